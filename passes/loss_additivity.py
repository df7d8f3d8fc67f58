"""Finds what in a loss no weights of micro-batches make exact: products of means, roots of means.

Values are classified by how they depend on the samples. Refused is only what is proven: a sum or a
mean over the batch that is multiplied by another, or goes through a function that is no straight
line, and from there into the loss by nothing but sums and factors. Everything else may be right
in a way that is not seen here, and is left to the comparison of numbers. That would not do for a
function with a bend, such as a bound on the loss: examples lie on one side of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from gpipe_compiler.ir import (
    Argument,
    Graph,
    Op,
    Reduction,
    Ref,
    StateRef,
    ValueKind,
)
from gpipe_compiler.ir.ops import in_one_mode
from gpipe_compiler.passes.loss_functions import (
    loss_arguments,
    mask_of_mean,
    mean_over_targets,
    reduction_of,
    takes_by_number,
)
from gpipe_compiler.passes.verbs import (
    AND,
    COMPARING,
    FILLED,
    MOVES,
    NOT,
    OR,
    ORDER,
    name_of,
    number_of,
)


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

KINKED = frozenset(
    {
        *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min"),
        *("relu", "relu6", "leaky_relu", "hardtanh", "abs"),
    }
)
"""Functions that are straight but for a bend."""

_NEVER_NEGATIVE = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "softplus", "exp", "relu"),
        *("square", "abs", "norm", "softmax", "sigmoid", "sqrt", "one_hot", "relu6"),
        *("mseloss", "l1loss", "smoothl1loss", "huberloss"),
        *("gt", "ge", "lt", "le", "eq", "ne", "isnan", "isfinite"),
    }
)
"""Functions that are never negative, whatever they are given; modules by their classes."""

_OF_PROBABILITIES = frozenset(
    {
        *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("crossentropyloss", "bceloss", "bcewithlogitsloss"),
    }
)
"""Losses that are never negative where their targets lie in [0, 1]."""

_PROBABILITIES = frozenset({"sigmoid", "softmax", "one_hot", "gt", "ge", "lt", "le", "eq", "ne"})

_NEAR_ZERO = 1e-6
"""A bound up to which is one of zero: it keeps a loss from becoming nothing."""

_EXTREMES = frozenset({"amax", "amin", "std", "var", "logsumexp", "prod", "norm"})
"""What a reduction over the batch can be besides a sum or a mean."""


def never_additive(graph: Graph) -> Bent | None:
    """Why micro-batches cannot give the loss of an annotated graph; None where that is open."""
    assert graph.loss is not None
    loss_ops = [op for op in graph.ops if op.name in graph.loss_only]
    numbering = next((op for op in loss_ops if takes_by_number(graph, op)), None)
    if numbering is not None:
        return Bent(numbering, "it takes some of what a mask selects, by their numbers")
    sorting = next((op for op in loss_ops if _sorts_samples(graph, op)), None)
    if sorting is not None:
        return Bent(sorting, "it puts numbers of the samples in order, and micro-batches their own")
    last = (found.get(graph.loss.value) for found in _dependences(graph))
    return next((item for item in last if isinstance(item, Bent)), None)


def _sorts_samples(graph: Graph, op: Op) -> bool:
    """Whether the sorted numbers of all samples are read: in which place each was is not."""
    args, kwargs = op.arguments
    known = graph.values.get(op.outputs[0]) if op.outputs else None
    if name_of(graph, op) not in ("sort", "msort") or known is None or known.batch_dim is None:
        return False
    first = 0 if name_of(graph, op) == "msort" else -1
    dim = kwargs.get("dim", args[1] if len(args) > 1 else first)
    read = any(op.outputs[0] in reader.inputs for reader in graph.ops)
    return read and isinstance(dim, int) and dim % len(known.shape) == known.batch_dim


def first_bent(graph: Graph) -> Bent | None:
    """What in a loss is no sum over samples, though what follows may make one of it."""
    found = (item for mode in _dependences(graph) for item in mode.values())
    return next((item for item in found if isinstance(item, Bent) and not item.kinked), None)


def _dependences(graph: Graph) -> Iterator[Mapping[str, Dependence]]:
    """How what the loss is made of depends on the samples, in either mode."""
    assert graph.loss is not None
    needed = graph.ancestors((graph.loss.value,))
    ops = tuple(op for op in graph.ops if op.name in needed)
    for training in (True, False) if any(op.has_choices for op in ops) else (True,):
        own = tuple(in_one_mode(op, training=training) for op in ops)
        yield _dependences_of(graph.replace(ops=own))


def _dependences_of(graph: Graph) -> dict[str, Dependence]:
    found: dict[str, Dependence] = {
        source.name: SampleUse.ROWS for source in graph.inputs if source.batched
    }
    for op in graph.ops:
        for name in op.outputs:
            dependence = _of(graph, op, name, found)
            if dependence is not None:
                found[name] = dependence
    return found


def _of(graph: Graph, op: Op, name: str, found: Mapping[str, Dependence]) -> Dependence | None:
    """What an op makes of what it reads; None for what is the same for all samples."""
    known = graph.values[name]
    name_of_call = name_of(graph, op)
    read = [found[value] for value in op.inputs if value in found]
    if known.kind is not ValueKind.TENSOR or name_of_call in FILLED or not read:
        return None
    if known.batch_dim is not None or not known.splittable:
        return SampleUse.ROWS if all(item is SampleUse.ROWS for item in read) else SampleUse.UNKNOWN
    if all(item is SampleUse.ROWS for item in read):
        return _reduced(graph, op, name_of_call)
    return _combined(graph, op, name_of_call, found)


def _reduced(graph: Graph, op: Op, name: str) -> Dependence:
    """What is left of rows in which no sample has a part of its own."""
    mask = mask_of_mean(graph, op)
    deciding = None if mask is None else _decided_by_the_model(graph, mask.name)
    if deciding is not None:
        return Bent(deciding, _DECIDED, kinked=True)
    if name in ("sum", "mean"):
        return SampleUse.LINEAR
    if mean_over_targets(graph, op) is not None:
        return SampleUse.WEIGHED
    if reduction_of(graph, op) in (Reduction.SUM, Reduction.MEAN):
        return SampleUse.LINEAR
    if name == "nanmean":
        return Bent(op, "it is the mean over what is not nan, and counts that by what it is given")
    alone = name in ("max", "min") and len(op.call.args) == 1 and not op.call.kwargs
    if name in _EXTREMES or alone:
        return Bent(op, f"it takes the {name} over the batch")
    return SampleUse.UNKNOWN


def _combined(
    graph: Graph, op: Op, name: str, found: Mapping[str, Dependence]
) -> Dependence | None:
    """What becomes of sums over samples."""
    read = [found[value] for value in op.inputs if value in found]
    if name in COMPARING and not {SampleUse.ROWS, SampleUse.UNKNOWN} & set(read):
        return Bent(op, "it compares a sum or mean over the batch", kinked=True)
    bent = next((item for item in read if isinstance(item, Bent)), None)
    args = op.call.args
    factors = [item for item in args if isinstance(item, Ref) and item.name in found]
    if name == "div" and len(factors) == 2 and found[factors[0].name] in _SUMS:
        divisor = found[factors[1].name]
        deciding = _decided_by_the_model(graph, factors[1].name)
        if deciding is not None:
            return Bent(deciding, _DECIDED, kinked=True)
        return SampleUse.WEIGHED if divisor in _SUMS or divisor is bent else SampleUse.UNKNOWN
    if name == "where" and isinstance(found.get(_name(args[0])), Bent):
        return Bent(op, "it chooses by a sum or mean over the batch", kinked=True)
    if bent is not None and (name in ("add", "sub") or (name == "mul" and bent.kinked)):
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
        case _ if bent is None and name in KINKED:
            if _never_turns(graph, op, name):
                return straight
            return Bent(op, f"it bends a mean over the batch, by {name}", kinked=True)
        case _:
            return SampleUse.UNKNOWN


_SUMS = (SampleUse.LINEAR, SampleUse.WEIGHED)


_DECIDED = "it is a mean over as many as exceed a bound, which the model decides in the step"

_OF_MASKS = frozenset(
    {
        *("sum", "mean", "count_nonzero", "clamp", "clamp_min", "maximum", "add", "mul", "where"),
    }
)
"""What counts masks, or joins them."""


def _decided_by_the_model(graph: Graph, value: str) -> Op | None:
    """The comparison with a bound by which masks, or their count, follow from what is trained."""
    op = graph.producer.get(value)
    if op is None:
        return None
    name = name_of(graph, op)
    if name in ORDER:
        bounded = any(number_of(graph, item) is not None for item in op.call.args)
        return op if bounded and _follows_from_trained(graph, value) else None
    if name not in _OF_MASKS | AND | OR | NOT | MOVES:
        return None
    found = (_decided_by_the_model(graph, source) for source in op.inputs)
    return next((deciding for deciding in found if deciding is not None), None)


def _follows_from_trained(graph: Graph, value: str) -> bool:
    ops = (graph.op_of[name] for name in graph.ancestors((value,)))
    return any(graph.state[name].requires_grad for op in ops for name in op.states(graph.modules))


def _name(argument: Argument) -> str:
    return argument.name if isinstance(argument, Ref) else ""


def _never_turns(graph: Graph, op: Op, name: str) -> bool:
    """Whether a function with a bend at zero takes what is never negative."""
    value, *bounds = op.call.args
    bounds.extend(op.call.kwargs.values())
    match name, [bound for bound in bounds if bound is not None]:
        case (("relu" | "abs"), _):
            return _is_never_negative(graph, value)
        case (("clamp" | "clamp_min"), [int() | float() as bound]):
            lower = name == "clamp_min" or len(op.call.args) == 2 or "min" in op.call.kwargs
            return lower and bound <= _NEAR_ZERO and _is_never_negative(graph, value)
        case _:
            return False


def _is_never_negative(graph: Graph, value: Argument) -> bool:
    """Whether that follows from how a value is made."""
    number = number_of(graph, value)
    if number is not None:
        return number >= 0
    op = graph.producer.get(value.name) if isinstance(value, Ref) else None
    if op is None:
        known = graph.values.get(_name(value))
        return known is not None and known.dtype is torch.bool
    name, args = name_of(graph, op), op.call.args
    if name in _NEVER_NEGATIVE or (name == "pow" and args[1] in (2, 4)):
        return True
    if name in _OF_PROBABILITIES:
        return _takes_probabilities(graph, op)
    if name in ("add", "mul", "div"):
        return all(_is_never_negative(graph, item) for item in args)
    return (name in ("sum", "mean") or name in MOVES) and _is_never_negative(graph, args[0])


def _takes_probabilities(graph: Graph, op: Op) -> bool:
    """Whether the targets of a loss are classes, or lie in [0, 1], and no class weighs below 0."""
    given = loss_arguments(graph, op)
    if given is None:
        return False
    weights = (given.get("weight"), given.get("pos_weight"))
    targets = given["target"]
    known = graph.values.get(_name(targets))
    kind = None if known is None else known.dtype
    classes = kind is not None and not kind.is_floating_point
    return (classes or _is_probability(graph, targets)) and all(
        weight is None or _is_never_negative_state(graph, weight) for weight in weights
    )


def _is_probability(graph: Graph, value: Argument) -> bool:
    """Whether it follows from how a value is made that it lies in [0, 1]."""
    number = number_of(graph, value)
    known = graph.values.get(_name(value))
    if number is not None or known is None or known.dtype is torch.bool:
        return known is not None and (number is None or 0 <= number <= 1)
    op = graph.producer.get(known.name)
    if op is None:
        return False
    name, args = name_of(graph, op), op.call.args
    if name == "clamp":
        bounds = [*args[1:], *op.call.kwargs.values()]
        return len(bounds) == 2 and all(type(b) in (int, float) and 0 <= b <= 1 for b in bounds)
    if name in ("mul", "where"):
        return all(_is_probability(graph, item) for item in args[-2:])
    return name in _PROBABILITIES or (name in MOVES and _is_probability(graph, args[0]))


def _is_never_negative_state(graph: Graph, weight: Argument) -> bool:
    """Whether weights are fixed numbers, none below zero, or follow from what is not."""
    if not isinstance(weight, StateRef):
        return _is_never_negative(graph, weight)
    tensor = graph.tensors[weight.name]
    fixed = not graph.state[weight.name].requires_grad and not tensor.is_meta
    return fixed and bool((tensor >= 0).all())


def _is_bent_by(exponents: tuple[object, ...]) -> bool:
    match exponents:
        case (int() | float() as exponent,):
            return exponent not in (0, 1)
        case _:
            return False
