"""What of a graph has sizes that the values of tensors decide.

A run without numbers takes selections to be as large as can be, and the parts of a split to be of
one size. Values that look otherwise where nothing is selected, and all is in one part, and numbers
that are computed with such values, are those that nobody knows before the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import FunctionCall, Graph, Op
from gpipe_compiler.ir.value_splits import all_in_one, is_value_split
from gpipe_compiler.passes.dry_run import DryRun, modes
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.observe import in_all_modes


def sized_by_values(graph: Graph) -> frozenset[str]:
    """The tensors whose shapes, and the other values that, are not known before the step.

    Raises:
        ModelError: naming an op that does not run where hardly anything is selected.
    """
    splits = any(map(is_value_split, graph.ops))
    if not splits and not any(run.guessed for run in in_all_modes(graph)):
        return frozenset()
    return graph.once("sized by values", lambda: _sized_by_values(graph))


def _sized_by_values(graph: Graph) -> frozenset[str]:
    try:
        found = _found(graph, 0)
    except ModelError:
        found = _found(graph, 1)  # what takes a maximum, or so, needs an element
    return found


def _found(graph: Graph, fewest: int) -> frozenset[str]:
    """Those that look otherwise where selections, and all parts but one, have so many elements."""
    every = [*filter(is_value_split, graph.ops)]
    results = [len(op.result) for op in every if isinstance(op.result, tuple)]
    # Of so many samples there are some for each part, be there one for every second of them.
    samples = graph.batch_size * 4 * max(results, default=1)
    ways = [partial(all_in_one, place=place, others=fewest) for place in (0, -1)]
    found: set[str] = set()
    plain: set[str] = set()
    for training in modes(graph):
        usual = _looks(graph, samples, training)
        plain.update(name for name, look in usual.items() if isinstance(look, str))
        for way in ways if every else ways[:1]:
            other = graph.replace(ops=tuple(_split(op, way) for op in graph.ops))
            looks = _looks(other, samples, training, selects=fewest)
            found.update(name for name, look in usual.items() if looks[name] != look)
    for op in graph.ops:
        if not plain.isdisjoint(found.intersection(op.inputs)):
            found.update(op.outputs)
    return frozenset(found)


def _looks(
    graph: Graph, samples: int, training: bool, *, selects: int | None = None
) -> Mapping[str, tuple[int, ...] | str]:
    """The shapes of tensors, and other values as text, by name."""
    fakes = HostFakes()
    fakes.selects = selects
    values = DryRun.of(graph, training=training, mode=fakes).run(samples)
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in values.items()
    }


def _split(op: Op, otherwise: Callable[..., Any]) -> Op:
    """An op whose splits are made in another way."""
    call = op.call
    if not isinstance(call, FunctionCall) or not is_value_split(op):
        return op
    return dataclasses.replace(op, call=dataclasses.replace(call, function=otherwise))
