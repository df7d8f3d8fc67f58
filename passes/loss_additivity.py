"""Finds what in a loss no weights of micro-batches make exact: products of means, roots of means.

Values are classified by how they depend on the samples. Refused is only what is proven: a sum or a
mean over the batch that is multiplied by another, or goes through a function that is nowhere
straight, and from there into the loss by nothing but sums and factors. Everything else may be right
in a way that is not seen here, and is left to the comparison of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from gpipe_compiler.ir import FunctionCall, Graph, Op, Reduction, Ref, ValueKind
from gpipe_compiler.passes.loss_functions import mean_over_targets, reduction_of
from gpipe_compiler.passes.loss_terms import verb


class SampleUse(Enum):
    """How a tensor depends on the samples."""

    ROWS = "rows"
    """Each sample has its own part of it."""
    LINEAR = "linear"
    """A sum over samples, or their mean."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Bent:
    """What is no sum over samples, nor any mean: made by this op, which does this."""

    op: Op
    what: str


Dependence = SampleUse | Bent

_CURVED = frozenset(
    {
        *("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "square"),
        *("reciprocal", "sigmoid", "tanh", "softplus"),
    }
)
"""Functions that are nowhere straight."""

_EXTREMES = frozenset({"amax", "amin", "std", "var", "logsumexp", "prod", "norm"})
"""What a reduction over the batch can be besides a sum or a mean."""

_MOVES = frozenset(
    {
        *("reshape", "view", "view_as", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"),
        *("float", "double", "to", "type", "type_as", "detach", "expand", "transpose", "permute"),
        *("t", "neg", "getitem", "select", "stack", "cat"),
    }
)
"""What keeps a sum over samples one: it moves elements, or turns their sign."""

_FILLED = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "arange", "zeros", "ones", "full"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "rand_like"),
    }
)
"""What asks a tensor for nothing but its size and type."""


def never_additive(graph: Graph) -> Bent | None:
    """Why micro-batches cannot give the loss of an annotated graph; None where that is open."""
    assert graph.loss is not None
    last = _dependences(graph).get(graph.loss.value)
    return last if isinstance(last, Bent) else None


def first_bent(graph: Graph) -> Bent | None:
    """What in a loss is no sum over samples, though what follows may make one of it."""
    return next((item for item in _dependences(graph).values() if isinstance(item, Bent)), None)


def _dependences(graph: Graph) -> dict[str, Dependence]:
    """How what the loss is made of depends on the samples."""
    assert graph.loss is not None
    found: dict[str, Dependence] = {
        source.name: SampleUse.ROWS for source in graph.inputs if source.batched
    }
    needed = graph.ancestors((graph.loss.value,))
    for op in graph.ops:
        if op.name not in needed:
            continue
        for name in op.outputs:
            dependence = _of(graph, op, name, found)
            if dependence is not None:
                found[name] = dependence
    return found


def _of(graph: Graph, op: Op, name: str, found: Mapping[str, Dependence]) -> Dependence | None:
    """What an op makes of what it reads; None for what is the same for all samples."""
    known = graph.values[name]
    name_of_call = _name(op)
    read = [found[value] for value in op.inputs if value in found]
    if known.kind is not ValueKind.TENSOR or name_of_call in _FILLED or not read:
        return None
    if known.batch_dim is not None or not known.splittable:
        return SampleUse.ROWS if all(item is SampleUse.ROWS for item in read) else SampleUse.UNKNOWN
    if all(item is SampleUse.ROWS for item in read):
        return _reduced(graph, op, name_of_call)
    return _combined(op, name_of_call, read, found)


def _name(op: Op) -> str:
    match op.call:
        case FunctionCall(function=torch.linalg.norm | torch.linalg.vector_norm):
            return "norm"
        case _:
            return verb(op)


def _reduced(graph: Graph, op: Op, name: str) -> Dependence:
    """What is left of rows in which no sample has a part of its own."""
    if name in ("sum", "mean"):
        return SampleUse.LINEAR
    if mean_over_targets(graph, op) is not None:
        return SampleUse.UNKNOWN
    if reduction_of(graph, op) in (Reduction.SUM, Reduction.MEAN):
        return SampleUse.LINEAR
    alone = name in ("max", "min") and len(op.call.args) == 1 and not op.call.kwargs
    if name in _EXTREMES or alone:
        return Bent(op, f"it takes the {name} over the batch")
    return SampleUse.UNKNOWN


def _combined(
    op: Op, name: str, read: list[Dependence], found: Mapping[str, Dependence]
) -> Dependence | None:
    """What becomes of sums over samples."""
    bent = next((item for item in read if isinstance(item, Bent)), None)
    if bent is not None and name in ("add", "sub"):
        return bent
    if SampleUse.UNKNOWN in read or SampleUse.ROWS in read:
        return SampleUse.UNKNOWN
    straight: Dependence = bent or SampleUse.LINEAR
    args = op.call.args
    factors = [item for item in args if isinstance(item, Ref) and item.name in found]
    match name:
        case "add" | "sub" | "sum" | "mean":
            return straight
        case _ if name in _MOVES:
            return straight
        case "mul" if len(factors) == 1:
            return None if 0 in [item for item in args if not isinstance(item, Ref)] else straight
        case "mul" if bent is None:
            return Bent(op, "it multiplies sums or means over the batch")
        case "div" if len(factors) == 1 and factors[0] == args[0]:
            return straight
        case "pow" if bent is None and _is_bent_by(args[1:]):
            return Bent(op, "it takes a power of a mean over the batch")
        case _ if bent is None and name in _CURVED:
            return Bent(op, f"it takes the {name} of a mean over the batch")
        case _:
            return SampleUse.UNKNOWN


def _is_bent_by(exponents: tuple[object, ...]) -> bool:
    match exponents:
        case (int() | float() as exponent,):
            return exponent not in (0, 1)
        case _:
            return False
