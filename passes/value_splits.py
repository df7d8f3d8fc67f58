"""What of a graph has sizes that the values of tensors decide, by how its tensors are split.

A run without numbers takes the parts to be equally long (`ir.value_splits`). Values that look
otherwise where all is in one part, the first or the last, and numbers that are computed with such
values, are those that nobody knows before the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gpipe_compiler.ir import FunctionCall, Graph, Op, RegionCall
from gpipe_compiler.ir.ops import ops_within
from gpipe_compiler.ir.value_splits import all_in_first, all_in_last, is_value_split
from gpipe_compiler.passes.observe import SeenValue, in_all_modes


def sized_by_values(graph: Graph) -> frozenset[str]:
    """The tensors whose shapes, and the other values that, are not known before the step.

    Raises:
        ModelError: naming an op that does not run where a part is empty.
    """
    if not any(is_value_split(op) for whole in graph.ops for op in ops_within(whole)):
        return frozenset()
    return graph.once("sized by values", lambda: _sized_by_values(graph))


def _sized_by_values(graph: Graph) -> frozenset[str]:
    every = [op for whole in graph.ops for op in ops_within(whole) if is_value_split(op)]
    parts = max(len(op.result) if isinstance(op.result, tuple) else 1 for op in every)
    # Of so many samples there are some for each part, be there one for every second of them.
    samples = graph.batch_size * 2 * parts
    even = in_all_modes(graph, samples)
    found: set[str] = set()
    for otherwise in (all_in_first, all_in_last):
        way = graph.replace(ops=tuple(_split(op, otherwise) for op in graph.ops))
        for one, other in zip(even, in_all_modes(way, samples), strict=True):
            pairs = ((name, seen, other.values[name]) for name, seen in one.values.items())
            found.update(name for name, seen, there in pairs if not _is_alike(seen, there))
    plain = {name for run in even for name, seen in run.values.items() if seen.form is None}
    for op in graph.ops:
        if not plain.isdisjoint(found.intersection(op.inputs)):
            found.update(op.outputs)
    return frozenset(found)


def _split(op: Op, otherwise: Callable[..., Any]) -> Op:
    """An op whose splits are made in another way."""
    call = op.call
    if isinstance(call, RegionCall):
        ops = tuple(_split(inner, otherwise) for inner in call.body.ops)
        call = dataclasses.replace(call, body=dataclasses.replace(call.body, ops=ops))
    elif isinstance(call, FunctionCall) and is_value_split(op):
        call = dataclasses.replace(call, function=otherwise)
    return op if call is op.call else dataclasses.replace(op, call=call)


def _is_alike(one: SeenValue, other: SeenValue) -> bool:
    if one.form is None or other.form is None:
        return repr(one.seen) == repr(other.seen)
    return one.form.shape == other.form.shape
