"""Which branches on values go for a batch as they go for all of its micro-batches.

A stage requires of each micro-batch that a line of the model decides as it did for the example.
What asks something of every sample (`h.isfinite().all()`, `x.max() < 100`, `x.mean() > 0`) then
holds of the batch. `x.sum() < 100` need not.
"""

from __future__ import annotations

import torch

from gpipe_compiler.ir import Argument, Graph, Op, Ref, RegionCall
from gpipe_compiler.ir.branches import is_requirement
from gpipe_compiler.passes.loss_additivity import name_of
from gpipe_compiler.passes.verbs import SAME, number_of

_FINITE = frozenset({"isfinite", "isinf", "isnan"})
_NOT = frozenset({"logical_not", "bitwise_not", "invert"})
_AND = frozenset({"and_", "logical_and", "bitwise_and"})
_OR = frozenset({"or_", "logical_or", "bitwise_or"})
_ORDER = frozenset({"lt", "le", "gt", "ge"})
_OF_EACH = frozenset({"max", "min", "amax", "amin", "mean"})
_COUNTS = frozenset({"sum", "count_nonzero"})


def first_of_batch(graph: Graph) -> Op | None:
    """The first requirement that may hold of all micro-batches and not of their batch.

    Args:
        graph: annotated. In a region types are not known: all counts there that goes with samples.
    """
    for op in graph.ops:
        if is_requirement(op):
            if not _follows(graph, op.call.args[0], True):
                return op
        elif isinstance(op.call, RegionCall):
            inner = _of_region(graph, op.call)
            if inner is not None:
                return inner
    return None


def _of_region(graph: Graph, region: RegionCall) -> Op | None:
    """The first requirement in a region that goes with samples."""
    given = zip(region.body.inputs, region.args, strict=True)
    found = {own for own, item in given if isinstance(item, Ref) and item.name in graph.batched}
    for op in region.body.ops:
        if not found.isdisjoint(op.inputs):
            if is_requirement(op):
                return op
            found.update(op.outputs)
    return None


def _follows(graph: Graph, condition: Argument, truth: bool) -> bool:
    """Whether a condition is so for a batch where it is so for each of its micro-batches."""
    if not isinstance(condition, Ref) or condition.name not in graph.batched:
        return True
    op = graph.producer.get(condition.name)
    if op is None or not op.call.args:
        return False
    name, first = name_of(graph, op), op.call.args[0]
    if name in SAME or name in _NOT:
        return _follows(graph, first, truth is (name not in _NOT))
    if name in (_AND if truth else _OR):
        return all(_follows(graph, part, truth) for part in op.call.args)
    if name in _AND | _OR:
        # Either holds of the batch where it holds of one micro-batch, or the other of all.
        parts = op.call.args
        spreading = [_spreads(graph, part, truth) for part in parts]
        return sum(spreading) >= len(parts) - 1 and all(
            spreads or _follows(graph, part, truth)
            for spreads, part in zip(spreading, parts, strict=True)
        )
    if name in ("all", "any"):
        return _is_of_samples(graph, first)
    if name in _FINITE:
        return truth is (name == "isfinite")
    if name in _ORDER or name in ("eq", "ne"):
        return _bound_follows(graph, op, name)
    return False


def _spreads(graph: Graph, condition: Argument, truth: bool) -> bool:
    """Whether a condition is so for a batch where it is so for one of its micro-batches."""
    op = graph.producer.get(condition.name) if isinstance(condition, Ref) else None
    name = "" if op is None else name_of(graph, op)
    return (
        op is not None
        and name == ("any" if truth else "all")
        and (_is_of_samples(graph, op.call.args[0]))
    )


def _bound_follows(graph: Graph, op: Op, name: str) -> bool:
    """The same of a comparison, whichever way it goes."""
    left, right = op.call.args[:2]
    if not isinstance(left, Ref) or left.name not in graph.batched:
        left, right = right, left
    if not isinstance(left, Ref) or (isinstance(right, Ref) and right.name in graph.batched):
        return False
    maker = graph.producer.get(left.name)
    if maker is None or not maker.call.args or not _is_of_samples(graph, maker.call.args[0]):
        return False
    kind = name_of(graph, maker)
    if kind in _COUNTS:
        source = maker.call.args[0]
        counts = isinstance(source, Ref) and graph.values[source.name].dtype is torch.bool
        return counts and number_of(graph, right) == 0
    return kind in _OF_EACH and name in _ORDER


def _is_of_samples(graph: Graph, value: Argument) -> bool:
    """Whether each sample has its own part of a value, which goes with nothing of other samples."""
    if not isinstance(value, Ref):
        return False
    before = graph.ancestors((value.name,))
    made = (name for op in graph.ops if op.name in before for name in op.outputs)
    found = (graph.values[name] for name in made if name in graph.batched)
    return all(v.dtype is None or (v.batch_dim is not None and v.splittable) for v in found)
