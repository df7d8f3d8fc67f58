"""Finds what in a loss no weights of micro-batches make exact: products of means, roots of means.

Values are classified by how they depend on the samples. Refused is only what is proven: a sum or a
mean over the batch that is multiplied by another, or goes through a function that is no straight
line, and from there into the loss by nothing but sums and factors. Everything else may be right
in a way that is not seen here, and is left to the comparison of numbers. That would not do for a
function with a bend, such as a bound on the loss: examples lie on one side of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import FunctionCall, Graph, ModuleCall, Op, Reduction, Ref, ValueKind
from gpipe_compiler.passes.loss_functions import mean_over_targets, reduction_of
from gpipe_compiler.passes.loss_terms import MOVES, verb


class SampleUse(Enum):
    """How a tensor depends on the samples."""

    ROWS = "rows"
    """Each sample has its own part of it."""
    LINEAR = "linear"
    """A sum over samples, or their mean."""
    WEIGHED = "weighed"
    """A mean over what counts, or another ratio of such sums."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Bent:
    """What is no sum over samples, nor any mean: made by this op, which does this.

    Attributes:
        kinked: whether it is one on either side of a bend.
    """

    op: Op
    what: str
    kinked: bool = False


Dependence = SampleUse | Bent

_CURVED = frozenset(
    {
        *("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "square"),
        *("reciprocal", "sigmoid", "tanh", "softplus"),
    }
)
"""Functions that are nowhere straight."""

_KINKED = frozenset(
    {
        *("clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "max", "min"),
        *("relu", "relu6", "leaky_relu", "hardtanh", "abs", "absolute", "fabs"),
    }
)
"""Functions that are straight but for a bend."""

_NEVER_NEGATIVE = frozenset(
    {
        *("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "hinge_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "softplus", "exp", "relu"),
        *("square", "abs", "norm", "softmax", "sigmoid", "sqrt"),
    }
)

_NEVER_NEGATIVE_MODULES = (
    nn.CrossEntropyLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)

_NEAR_ZERO = 1e-6
"""A bound up to which is one of zero: it keeps a loss from becoming nothing."""

_EXTREMES = frozenset({"amax", "amin", "std", "var", "logsumexp", "prod", "norm"})
"""What a reduction over the batch can be besides a sum or a mean."""

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
    found = (item for item in _dependences(graph).values() if isinstance(item, Bent))
    return next((item for item in found if not item.kinked), None)


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
    name_of_call = _function(graph, op)
    read = [found[value] for value in op.inputs if value in found]
    if known.kind is not ValueKind.TENSOR or name_of_call in _FILLED or not read:
        return None
    if known.batch_dim is not None or not known.splittable:
        return SampleUse.ROWS if all(item is SampleUse.ROWS for item in read) else SampleUse.UNKNOWN
    if all(item is SampleUse.ROWS for item in read):
        return _reduced(graph, op, name_of_call)
    return _combined(graph, op, name_of_call, found)


def _function(graph: Graph, op: Op) -> str:
    """What an op does, also where it is written as `F.relu`, or as a module of torch's."""
    match op.call:
        case FunctionCall(function=function) if not verb(op):
            name = getattr(function, "__name__", "")
            return name if getattr(F, name, None) is function else ""
        case ModuleCall(module=path):
            cls = graph.modules[path].cls
            return cls.__name__.lower() if getattr(nn, cls.__name__, None) is cls else ""
    return verb(op)


def _reduced(graph: Graph, op: Op, name: str) -> Dependence:
    """What is left of rows in which no sample has a part of its own."""
    if name in ("sum", "mean"):
        return SampleUse.LINEAR
    if mean_over_targets(graph, op) is not None:
        return SampleUse.WEIGHED
    if reduction_of(graph, op) in (Reduction.SUM, Reduction.MEAN):
        return SampleUse.LINEAR
    alone = name in ("max", "min") and len(op.call.args) == 1 and not op.call.kwargs
    if name in _EXTREMES or alone:
        return Bent(op, f"it takes the {name} over the batch")
    return SampleUse.UNKNOWN


def _combined(
    graph: Graph, op: Op, name: str, found: Mapping[str, Dependence]
) -> Dependence | None:
    """What becomes of sums over samples."""
    read = [found[value] for value in op.inputs if value in found]
    bent = next((item for item in read if isinstance(item, Bent)), None)
    args = op.call.args
    factors = [item for item in args if isinstance(item, Ref) and item.name in found]
    if name == "div" and len(factors) == 2 and found[factors[0].name] in _SUMS:
        divisor = found[factors[1].name]
        return SampleUse.WEIGHED if divisor in _SUMS or divisor is bent else SampleUse.UNKNOWN
    if name == "where" and _chooses_by_a_branch(graph, op, found):
        return Bent(op, "it chooses by a mean over the batch", kinked=True)
    if bent is not None and name in ("add", "sub"):
        return bent
    if SampleUse.UNKNOWN in read or SampleUse.ROWS in read:
        return SampleUse.UNKNOWN
    weighed = SampleUse.WEIGHED in read
    straight: Dependence = bent or (SampleUse.WEIGHED if weighed else SampleUse.LINEAR)
    match name:
        case "add" | "sub" | "sum" | "mean":
            return straight
        case _ if name in MOVES or name == "neg":
            return straight
        case "mul" if len(factors) == 1:
            return None if 0 in [item for item in args if not isinstance(item, Ref)] else straight
        case "mul" if bent is None and not weighed:
            return Bent(op, "it multiplies sums or means over the batch")
        case "div" if len(factors) == 1 and factors[0] == args[0]:
            return straight
        case "pow" if bent is None and _is_bent_by(args[1:]):
            return Bent(op, "it takes a power of a mean over the batch")
        case _ if bent is None and name in _CURVED:
            return Bent(op, f"it takes the {name} of a mean over the batch")
        case _ if bent is None and name in _KINKED:
            if _never_turns(graph, op, name):
                return straight
            return Bent(op, f"it bends a mean over the batch, by {name}", kinked=True)
        case _:
            return SampleUse.UNKNOWN


_SUMS = (SampleUse.LINEAR, SampleUse.WEIGHED)


def _chooses_by_a_branch(graph: Graph, op: Op, found: Mapping[str, Dependence]) -> bool:
    """Whether a sum over samples is taken where it compares so with something, else another."""
    condition, *branches = op.call.args
    maker = graph.producer.get(condition.name) if isinstance(condition, Ref) else None
    sums = {
        item.name for item in branches if isinstance(item, Ref) and found.get(item.name) in _SUMS
    }
    return maker is not None and not sums.isdisjoint(maker.inputs)


def _never_turns(graph: Graph, op: Op, name: str) -> bool:
    """Whether a function with a bend at zero takes what is never negative."""
    value, *bounds = op.call.args
    bounds.extend(op.call.kwargs.values())
    match name, [bound for bound in bounds if bound is not None]:
        case (("relu" | "abs" | "absolute" | "fabs"), _):
            return _is_never_negative(graph, value)
        case (("clamp" | "clamp_min" | "clip"), [int() | float() as bound]):
            lower = name == "clamp_min" or len(op.call.args) == 2 or "min" in op.call.kwargs
            return lower and bound <= _NEAR_ZERO and _is_never_negative(graph, value)
        case _:
            return False


def _is_never_negative(graph: Graph, value: object) -> bool:
    """Whether that follows from how a value is made."""
    if isinstance(value, int | float):
        return value >= 0
    op = graph.producer.get(value.name) if isinstance(value, Ref) else None
    if op is None:
        return False
    match op.call:
        case ModuleCall(module=path):
            return issubclass(graph.modules[path].cls, _NEVER_NEGATIVE_MODULES)
        case FunctionCall(function=function) if (
            getattr(function, "__name__", "") in _NEVER_NEGATIVE
        ):
            return True
    name, args = verb(op), op.call.args
    if name in _NEVER_NEGATIVE or (name == "pow" and args[1] in (2, 4)):
        return True
    if name in ("add", "mul", "div"):
        return all(_is_never_negative(graph, item) for item in args)
    return (name in ("sum", "mean") or name in MOVES) and _is_never_negative(graph, args[0])


def _is_bent_by(exponents: tuple[object, ...]) -> bool:
    match exponents:
        case (int() | float() as exponent,):
            return exponent not in (0, 1)
        case _:
            return False
