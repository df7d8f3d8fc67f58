"""Finds what is decided by a bound on something that is taken over the batch.

`h * (mask.sum() > 1000)`, `where(h.mean() > 50, a, b)`, `h * sigmoid(x.max() - 60)`, and
`rank = mask.cumsum(0)`, `rank < 64` do the same to all batches on which they are tried, as long as
these lie on one side of the bound. A micro-batch may lie on another side than its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import torch

from gpipe_compiler.ir import Argument, Graph, Op, Ref, ValueKind
from gpipe_compiler.ir.branches import is_requirement
from gpipe_compiler.passes.joined_outputs import Unjoined, ways_of
from gpipe_compiler.passes.loss_additivity import KINKED
from gpipe_compiler.passes.verbs import (
    AND,
    BOUNDING,
    COMPARING,
    FILLED,
    FINITE,
    MOVES,
    NOT,
    OR,
    ORDER,
    SAME,
    SATURATING,
    STEPPED,
    counted_above_zero,
    name_of,
    number_of,
    origin,
    verb,
)
from gpipe_compiler.runtime.spec import Joined

_NUMBERING = frozenset({"cumsum", "argsort", "logcumsumexp", "cumprod", "cummax", "cummin"})

_LEAST = 1.0
"""Bounds up to which a count in a loss asks no more than whether there is anything."""


class _Taken(Enum):
    """What a value is that depends on samples."""

    ROWS = "a part for each sample"
    RANKED = "a part for each, by how many others come before it"
    TOGETHER = "one for the whole batch"


def first_gate(graph: Graph) -> Op | None:
    """The first op that does to samples what a bound on something taken over the batch decides."""
    found = {source.name: _Taken.ROWS for source in graph.inputs if source.batched}
    gates: dict[str, Op] = {}
    for op in graph.ops:
        name = name_of(graph, op)
        read = [value for value in op.inputs if value in found]
        if not read or name in FILLED | FINITE:
            continue  # what guards against numbers that are none compares nothing
        gate = _gate(graph, op, name, found)
        gated = [v for v in read if v in gates and not _decides_nothing(graph, op, name, v)]
        behind = gate or next((gates[value] for value in gated), None)
        for value in op.outputs:
            known = graph.values[value]
            if known.kind is not ValueKind.TENSOR:
                continue
            if known.batch_dim is None and known.splittable:
                found[value] = _Taken.TOGETHER
                chosen = behind or (op if _is_choice(graph, op, value) else None)
                if chosen is not None:
                    gates[value] = chosen
            elif behind is not None:
                return behind
            else:
                found[value] = _of_rows(graph, op, name, found)
    return None


def _is_choice(graph: Graph, op: Op, value: str) -> bool:
    """Whether a value for the whole batch is a yes or no, as whether any sample has something."""
    return graph.values[value].dtype is torch.bool and op.name not in graph.loss_only


def _of_rows(graph: Graph, op: Op, name: str, found: Mapping[str, _Taken]) -> _Taken:
    """What an op makes of samples each of which has its own part of it."""
    ranked = any(found.get(value) is _Taken.RANKED for value in op.inputs)
    return _Taken.RANKED if ranked or _numbers_samples(graph, op, name) else _Taken.ROWS


def _numbers_samples(graph: Graph, op: Op, name: str) -> bool:
    """Whether an op adds up, or orders, along the batch."""
    if name not in _NUMBERING or not op.call.args or not isinstance(op.call.args[0], Ref):
        return False
    known = graph.values[op.call.args[0].name]
    dim = next(_dims(op), None)
    if known.batch_dim is None or dim is None:
        return False
    return dim % len(known.shape) == known.batch_dim


def _dims(op: Op) -> Iterator[int]:
    args = (op.call.kwargs.get("dim"), *op.call.args[1:2])
    return (item for item in args if type(item) is int)


def _gate(graph: Graph, op: Op, name: str, found: Mapping[str, _Taken]) -> Op | None:
    """The op itself where it sets a bound to what is taken over the batch."""
    bounds = [number_of(graph, item) for item in op.leaves]
    counts = any(number is not None and number > _LEAST for number in bounds)
    read = {found[value] for value in op.inputs if value in found}
    if _Taken.RANKED in read:
        return op if counts and name in COMPARING | BOUNDING else None
    if _Taken.TOGETHER not in read or name not in KINKED | COMPARING | STEPPED | SATURATING:
        return None
    if op.name in graph.loss_only:
        return op if counts and name in COMPARING | STEPPED else None
    together = [value for value in op.inputs if found.get(value) is _Taken.TOGETHER]
    # A bound that is the largest length lets each sample's own length pass.
    whole = all(_is_integer(graph, value) for value in together)
    return None if whole and len(read) > 1 else op


def _decides_nothing(graph: Graph, op: Op, name: str, gated: str) -> bool:
    """Whether an op makes the same of samples on either side of a bound.

    `(pos < lengths.max()) & (pos < lengths[:, None])` is its second part, and
    `where(mask.any(), h.masked_fill(mask, 0), h)` is `h.masked_fill(mask, 0)`.
    """
    operands = [item.name for item in op.call.args if isinstance(item, Ref)]
    if name in AND | {"mul"} and len(operands) == 2:
        others = [operand for operand in operands if operand != gated]
        return len(others) == 1 and _is_implied(graph, gated, others[0])
    if name != "where" or len(operands) != 3 or gated != operands[0] or gated in operands[1:]:
        return False
    counted = counted_above_zero(graph, Ref(gated))
    if counted is None:
        return False
    filled, plain = operands[1:] if counted[1] else operands[:0:-1]
    maker, counter = graph.producer.get(filled), graph.producer.get(counted[0])
    if maker is None or verb(maker) != "masked_fill" or maker.call.args[0] != Ref(plain):
        return False
    if counter is None or verb(counter) not in ("any", "sum", "count_nonzero"):
        return False
    mask, counting = maker.call.args[1], counter.call.args[0]
    masks = {_moved(graph, item.name) for item in (mask, counting) if isinstance(item, Ref)}
    return len(masks) == 1 and graph.values[masks.pop()].dtype is torch.bool


def _is_implied(graph: Graph, bound: str, other: str) -> bool:
    """Whether places are below the largest length wherever they are below a sample's own."""
    below, beside = _below(graph, bound), _below(graph, other)
    if below is None or beside is None or (beside[0] and not below[0]):
        return False
    (_, place, largest), (_, own_place, length) = below, beside
    maker = graph.producer.get(_moved(graph, largest))
    if maker is None or verb(maker) not in ("max", "amax") or len(maker.call.args) != 1:
        return False
    lengths = maker.call.args[0]
    places = _made(graph, _moved(graph, place)), _made(graph, _moved(graph, own_place))
    return (
        isinstance(lengths, Ref)
        and not maker.call.kwargs
        and _moved(graph, lengths.name) == _moved(graph, length)
        and places[0] == places[1]
        and _runs_along(graph, bound) == _runs_along(graph, other) != ()
    )


def _below(graph: Graph, value: str) -> tuple[bool, str, str] | None:
    """Of `a < b` or `a <= b`, perhaps as numbers: whether they may be equal, a, and b."""
    op = graph.producer.get(_moved(graph, value))
    operands = () if op is None else op.call.args
    if op is None or len(operands) != 2 or not all(isinstance(item, Ref) for item in operands):
        return None
    left, right = (item.name for item in operands)
    match name_of(graph, op):
        case "lt" | "le" as name:
            return name == "le", left, right
        case "gt" | "ge" as name:
            return name == "ge", right, left
    return None


def _moved(graph: Graph, value: str) -> str:
    """The value whose elements these are, before they were moved or cast."""
    return origin(graph, value, lambda op: verb(op) in MOVES)


def _made(graph: Graph, value: str) -> object:
    """How a value is made, the same for those that are made alike."""
    op = graph.producer.get(value)
    return value if op is None else op.call


def _runs_along(graph: Graph, value: str) -> tuple[int, ...]:
    """The dimensions of more than one element, counted from the last one, but for the batch."""
    known = graph.values[value]
    rank = len(known.shape)
    batch = None if known.batch_dim is None else known.batch_dim - rank
    dims = tuple(i - rank for i, size in enumerate(known.shape) if size != 1 and i - rank != batch)
    return dims if len(dims) == 1 else ()


def _is_integer(graph: Graph, value: str) -> bool:
    dtype = graph.values[value].dtype
    return dtype is not None and not dtype.is_floating_point and dtype is not torch.bool


# --- branches on values ---------------------------------------------------------------------------


_OF_EACH = frozenset({"max", "min", "amax", "amin", "mean"})
_COUNTS = frozenset({"sum", "count_nonzero"})


def first_of_batch(graph: Graph) -> Op | None:
    """The first requirement that may hold of all micro-batches and not of their batch.

    A stage requires of each micro-batch that a line of the model decides as it did for the example.
    What asks something of every sample (`h.isfinite().all()`, `x.max() < 100`, `x.mean() > 0`) then
    holds of the batch. `x.sum() < 100` need not.

    Args:
        graph: annotated.
    """
    for op in graph.ops:
        if is_requirement(op) and not _follows(graph, op.call.args[0], True):
            return op
    return None


def _follows(graph: Graph, condition: Argument, truth: bool) -> bool:
    """Whether a condition is so for a batch where it is so for each of its micro-batches."""
    if not isinstance(condition, Ref) or condition.name not in graph.batched:
        return True
    op = graph.producer.get(condition.name)
    if op is None or not op.call.args:
        return False
    name, first = name_of(graph, op), op.call.args[0]
    if name in SAME or name in NOT:
        return _follows(graph, first, truth is (name not in NOT))
    if name in (AND if truth else OR):
        return all(_follows(graph, part, truth) for part in op.call.args)
    if name in AND | OR:
        # Either holds of the batch where it holds of one micro-batch, or the other of all.
        parts = op.call.args
        spreading = [_spreads(graph, part, truth) for part in parts]
        return sum(spreading) >= len(parts) - 1 and all(
            spreads or _follows(graph, part, truth)
            for spreads, part in zip(spreading, parts, strict=True)
        )
    if name in ("all", "any"):
        return _is_of_samples(graph, first)
    if name in FINITE:
        return truth is (name == "isfinite")
    if name in ORDER or name in ("eq", "ne"):
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
    return kind in _OF_EACH and name in ORDER


def _is_of_samples(graph: Graph, value: Argument) -> bool:
    """Whether each sample has its own part of a value, which goes with nothing of other samples."""
    return isinstance(value, Ref) and ways_of(graph)[value.name] in (Unjoined.ROWS, Joined.SAME)
