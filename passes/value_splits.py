"""What of a graph has sizes that the values of tensors decide, by how its tensors are split.

A run without numbers takes the parts to be equally long (`ir.value_splits`). Values that look
otherwise where each part has another size are those whose sizes nobody knows before the step.
"""

from __future__ import annotations

import dataclasses

from gpipe_compiler.ir import FunctionCall, Graph, Op, RegionCall
from gpipe_compiler.ir.ops import ops_within
from gpipe_compiler.ir.value_splits import FEWEST, is_value_split, split_unevenly
from gpipe_compiler.passes.observe import SeenValue, in_all_modes


def sized_by_values(graph: Graph) -> frozenset[str]:
    """The tensors whose shapes, and the other values that, are not known before the step.

    Raises:
        ModelError: naming a split of which that cannot be told.
    """
    if not any(is_value_split(op) for whole in graph.ops for op in ops_within(whole)):
        return frozenset()
    return graph.once("sized by values", lambda: _sized_by_values(graph))


def _sized_by_values(graph: Graph) -> frozenset[str]:
    every = (op for whole in graph.ops for op in ops_within(whole) if is_value_split(op))
    parts = max(len(op.result) if isinstance(op.result, tuple) else 1 for op in every)
    # Of so many samples each part can have another size, be it of every second row.
    samples = graph.batch_size * 2 * FEWEST * parts
    other = graph.replace(ops=tuple(map(_unevenly, graph.ops)))
    pairs = zip(in_all_modes(graph, samples), in_all_modes(other, samples), strict=True)
    return frozenset(
        name
        for one, two in pairs
        for name, seen in one.values.items()
        if not _is_alike(seen, two.values[name])
    )


def _unevenly(op: Op) -> Op:
    call = op.call
    if isinstance(call, RegionCall):
        body = dataclasses.replace(call.body, ops=tuple(map(_unevenly, call.body.ops)))
        return dataclasses.replace(op, call=dataclasses.replace(call, body=body))
    if isinstance(call, FunctionCall) and is_value_split(op):
        return dataclasses.replace(op, call=dataclasses.replace(call, function=split_unevenly))
    return op


def _is_alike(one: SeenValue, other: SeenValue) -> bool:
    if one.form is None or other.form is None:
        return repr(one.seen) == repr(other.seen)
    return one.form.shape == other.form.shape
