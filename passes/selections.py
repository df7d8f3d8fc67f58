"""Means over what a mask selects, and what is taken of it by number."""

from __future__ import annotations

import sys

import torch

from gpipe_compiler.ir import Graph, Op, Reduction, Ref, called
from gpipe_compiler.passes.loss_functions import reduction_of
from gpipe_compiler.passes.unknown_sizes import selection_behind
from gpipe_compiler.passes.verbs import verb


def mask_of_mean(graph: Graph, op: Op) -> Ref | None:
    """The mask that selects all elements that an op is the mean of; None for any other op."""
    plain = verb(op) == "mean" and len(op.call.args) == 1 and not op.call.kwargs
    if not plain and reduction_of(graph, op) is not Reduction.MEAN:
        return None
    masks = [mask_behind(graph, name) for name in op.inputs if name in graph.batched]
    first = masks[0] if masks else None
    return first if first is not None and all(mask == first for mask in masks) else None


def mask_behind(graph: Graph, value: str) -> Ref | None:
    """The mask that selects the rows of a value, each of which is computed from rows alike."""
    op = graph.producer.get(value)
    if op is None or graph.values[value].splittable or takes_by_number(graph, op):
        return None
    found = _selected_by(graph, op)
    if found is not None:
        return found
    rows = graph.values[value].shape[:1]
    behind = [name for name in op.inputs if name in graph.batched]
    masks = [mask_behind(graph, name) for name in behind]
    alike = all(graph.values[name].shape[:1] == rows for name in behind)
    return masks[0] if masks and alike and all(mask == masks[0] for mask in masks) else None


def _selected_by(graph: Graph, op: Op) -> Ref | None:
    """The mask of `x[mask]` and `x.masked_select(mask)`."""
    if called(op.call) not in ("getitem", "masked_select") or len(op.call.args) != 2:
        return None
    mask = op.call.args[1]
    known = graph.values.get(mask.name) if isinstance(mask, Ref) else None
    batched = known is not None and known.batch_dim is not None and known.splittable
    return mask if batched and known is not None and known.dtype is torch.bool else None


def takes_by_number(graph: Graph, op: Op) -> bool:
    """Whether an op takes some of the rows that are selected by their numbers: `x[mask][:64]`."""
    if called(op.call) != "getitem" or not isinstance(source := op.call.args[0], Ref):
        return False
    index = op.call.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    numbers = (first.start, first.stop, first.step) if isinstance(first, slice) else (first,)
    # All rows are those from 0 to the largest number, one by one.
    named = any(type(item) is int and abs(item) < sys.maxsize for item in numbers)
    if not named or (numbers[0] in (0, None) and numbers[1:] in ((None, None), (None, 1))):
        return False
    known = graph.values[source.name]
    selected = source.name in graph.batched and not known.splittable
    return selected and selection_behind(graph, source.name) is not None
