"""What the terms of a loss are means over: targets that count, the sum of a mask, a divisor."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass

import torch

from gpipe_compiler.ir import Argument, FunctionCall, Graph, LossTerm, MethodCall, Op, Ref, called
from gpipe_compiler.ir.sizes import at_batch, is_free
from gpipe_compiler.passes.loss_functions import (
    LAST,
    Division,
    Guarded,
    Selected,
    Step,
    Targets,
    Term,
    mask_behind,
    vanishes,
)
from gpipe_compiler.passes.loss_terms import Terms
from gpipe_compiler.passes.verbs import (
    counted_above_zero,
    elements_of,
    is_number_of,
    number_of,
    origin,
    verb,
)
from gpipe_compiler.runtime.sizes import Dim
from gpipe_compiler.runtime.spec import Reduction


@dataclass(frozen=True, slots=True)
class Count:
    """What a term of the loss is a mean over.

    Attributes:
        reader: the op of the loss before which it is counted.
        base: what the first step is done to.
        steps: what is done, each to the result of the one before.
        floor, offset, above, least: as in `LossWeight`.
    """

    reader: Op
    what: str
    base: Argument
    steps: tuple[Step, ...]
    floor: float = -math.inf
    offset: float = 0.0
    above: float = -math.inf
    least: float = -math.inf


def count_of(terms: Terms, term: Term) -> Count | None:
    """The count of a term; None for samples."""
    match term:
        case Targets():
            return _targets(terms.graph, term)
        case Division():
            return _divisor(terms, term)
        case Selected(op=op, mask=mask):
            return Count(op, "what a mask selects", mask, (MethodCall("sum", (LAST,)),))
        case _:
            return None


def guard_of(terms: Terms, term: Guarded) -> Count | None:
    """What has to be above zero for a term to count; None where that is no sum over samples."""
    op = terms.graph.producer.get(_apart_from_type(terms, term.counted or ""))
    if op is None or not _is_over_samples(terms, op, "any"):
        return None
    base, *options = op.call.args
    total = MethodCall("sum", (LAST,)) if verb(op) == "any" else _as_sum(op, (LAST, *options))
    return Count(term.op, "", base, (total,))


def with_targets(graph: Graph, count: Count, ignored: int | None) -> Count:
    """A count in which the targets that are no index stand, where it is one of such targets.

    Args:
        ignored: of the targets of a loss of torch's, which raises for others below zero.
    """
    maker = graph.producer.get(count.base.name) if isinstance(count.base, Ref) else None
    if maker is None or len(maker.call.args) != 2:
        return count
    targets, bound = maker.call.args
    match called(maker.call), bound:
        case "ne", _:
            ignored = bound
        case ("ge", 0) | ("gt", -1) if ignored is not None and ignored < 0:
            pass
        case _:
            return count
    counted = FunctionCall(operator.ne, (LAST, ignored))
    base = elements_of(graph, targets)
    return dataclasses.replace(count, base=base, steps=(counted, *count.steps))


def _targets(graph: Graph, term: Targets) -> Count:
    """`(targets != -100).sum()`, or `weights[targets[targets != -100]].sum()`."""
    targets = elements_of(graph, term.targets)
    counted = FunctionCall(operator.ne, (LAST, term.ignored))
    what = f"the targets other than {term.ignored}"
    if term.weights is None:
        return Count(term.op, what, targets, (counted, MethodCall("sum", (LAST,))))
    steps = (
        counted,
        FunctionCall(operator.getitem, (targets, LAST)),
        FunctionCall(operator.getitem, (term.weights, LAST)),
        MethodCall("sum", (LAST,)),
    )
    return Count(term.op, f"{what}, each with the weight of its class", targets, steps)


def _divisor(terms: Terms, term: Division) -> Count | None:
    """What a divisor adds up; None where it is no sum over samples."""
    divisor = guarded_sum(terms, term.divisor)
    if divisor is None or term.total not in (None, verb(divisor.op) != "mean"):
        return None
    op = divisor.op
    what = "the sum by which it is divided"
    base, *options = op.call.args or (None,)
    several = _adds_sums(terms, op)
    if several:
        total: Step = FunctionCall(getattr(operator, verb(op)), (LAST, *options))
    elif _is_over_samples(terms, op):
        total = _as_sum(op, (LAST, *options))
    else:
        return None
    unsafe = divisor.is_bare and (several or not vanishes(terms.graph, term.op, base))
    least = 1.0 if unsafe else -math.inf
    return Count(term.op, what, base, (total,), divisor.floor, divisor.offset, least=least)


@dataclass(frozen=True, slots=True)
class Divisor:
    """A divisor that is `factor * (max(sum, floor) + offset)` of what an op sums up."""

    op: Op
    factor: float
    floor: float
    offset: float

    @property
    def is_bare(self) -> bool:
        """Whether it may be 0."""
        return self.floor + self.offset <= 0


def guarded_sum(terms: Terms, value: str) -> Divisor | None:
    """What stands between a divisor and a sum; None where that is something else."""
    steps: list[tuple[str, float]] = []
    while (op := terms.graph.producer.get(value)) is not None:
        step = _guard_step(terms, op)
        if step is None:
            break
        value, name, number = step
        steps.append((name, number))
    factor, floor, offset = 1.0, -math.inf, 0.0
    for name, number in reversed(steps):
        if name == "mul":
            if not 0 < number < math.inf:
                return None
            factor *= number
        elif name == "add":
            offset += number / factor
        else:
            floor = max(floor, number / factor - offset)
    return None if op is None else Divisor(op, factor, floor, offset)


def _guard_step(terms: Terms, op: Op) -> tuple[str, str, float] | None:
    """The scalar that an op takes, what it does to it, and with what number; None for others.

    It adds (`add`), multiplies (`mul`), or takes the larger of both (`max`).
    """
    args, kwargs = op.arguments
    match verb(op), args:
        case "where", (tested, count, other):
            return _counted_or(terms, tested, count, other, above=True) or _counted_or(
                terms, tested, other, count, above=False
            )
        case "masked_fill", (count, tested, other):
            return _counted_or(terms, tested, count, other, above=False)
        case "add", (count, tested) if isinstance(tested, Ref) and not kwargs:
            return _counted_or(terms, tested, count, 1, above=False)
    if not args or not terms.is_scalar(args[0]):
        return None
    source: str = args[0].name
    if terms.keeps(op):
        return source, "mul", 1.0
    match verb(op), args[1:]:
        case "add", (int() | float() as number,) if not kwargs:
            return source, "add", float(number)
        case "sub", (int() | float() as number,) if not kwargs:
            return source, "add", -float(number)
        case "mul", (int() | float() as number,):
            return source, "mul", float(number)
        case "div", (int() | float() as number,) if not kwargs and number:
            return source, "mul", 1 / number
        case "maximum" | "max" | "fmax", (other,) if number_of(terms.graph, other) is not None:
            return source, "max", number_of(terms.graph, other) or 0.0
        case "clamp" | "clamp_min", rest:
            options = dict(zip(("min", "max"), rest, strict=False)) | kwargs
            least = number_of(terms.graph, options.pop("min", None))
            if least is not None and set(options.values()) <= {None}:
                return source, "max", least
    return None


def _counted_or(
    terms: Terms, tested: Argument, count: Argument, other: Argument, *, above: bool
) -> tuple[str, str, float] | None:
    """As of a guard, for how many things there are, or another number where there are none.

    Args:
        above: whether the condition asks for some, and not for none.
    """
    least = number_of(terms.graph, other)
    if not isinstance(count, Ref) or not is_number_of(terms.graph, count) or not least:
        return None
    condition = Ref(_apart_from_type(terms, getattr(tested, "name", "")))
    asked_of, holds = counted_above_zero(terms.graph, condition) or ("", not above)
    same = _apart_from_type(terms, asked_of) == _apart_from_type(terms, count.name)
    # Nothing is counted below 1: there any divisor will do.
    return (count.name, "max", min(least, 1.0)) if same and holds is above else None


def _apart_from_type(terms: Terms, value: str) -> str:
    """The scalar that a scalar is, in any type."""
    return origin(terms.graph, value, terms.keeps)


def _is_over_samples(terms: Terms, op: Op, *others: str) -> bool:
    """Whether an op adds up, or averages, something of all samples; or does something other."""
    if verb(op) not in ("sum", "mean", "count_nonzero", *others) or not op.call.args:
        return False
    source = op.call.args[0]
    known = terms.value(source)
    if known is not None and not known.splittable and (verb(op), *op.arguments[0][1:]) == ("sum",):
        return mask_behind(terms.graph, source.name) is not None
    return known is not None and known.splittable and known.batch_dim is not None


def _adds_sums(terms: Terms, op: Op) -> bool:
    """Whether an op adds sums over samples, such as those of several levels, or takes them from
    each other, or from how many elements there are."""
    args, options = op.arguments
    if verb(op) not in ("add", "sub") or len(args) != 2 or options:
        return False
    numbers = [terms.grows_with_batch(item) for item in args]
    sums = [terms.is_scalar(item) and _is_sum(terms, item.name) for item in args]
    return any(sums) and all(map(operator.or_, numbers, sums))


def _is_sum(terms: Terms, value: str) -> bool:
    op = terms.graph.producer.get(_apart_from_type(terms, value))
    return op is not None and (
        _adds_sums(terms, op) or (verb(op) != "mean" and _is_over_samples(terms, op))
    )


def _as_sum(op: Op, args: tuple[Argument, ...]) -> Step:
    """The call on other arguments, a mean as a sum: of means of parts no whole can be made."""
    match op.call:
        case MethodCall(method=method, kwargs=kwargs):
            return MethodCall("sum" if method == "mean" else method, args, kwargs)
        case FunctionCall(function=function, kwargs=kwargs):
            return FunctionCall(torch.sum if function is torch.mean else function, args, kwargs)
        case _:
            raise AssertionError(op)


# --- of how many things per sample a loss is the mean, where sizes are free ----------------------


_MEANS = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mean"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    }
)
"""Functions that are the mean over all elements of what they are given, unless told otherwise."""

_SCALES = frozenset({"mul", "div", "truediv", "neg"})


def per_sample(graph: Graph, term: LossTerm) -> Dim | None:
    """Of how many things per sample a term of the loss is the mean; None where that is not known.

    1 where it is a sum, where it is counted otherwise, and where it is as many at any size.
    Micro-batches of different sizes weigh by that in the loss of their mini-batch.
    """
    if not graph.sizes or term.reduction is Reduction.SUM or term.weight is not None:
        return 1
    op = graph.producer.get(term.value)
    while op is not None and called(op.call) in _SCALES and _scaled(graph, op) is not None:
        op = graph.producer.get(_scaled(graph, op) or "")
    if op is None or called(op.call) not in _MEANS or not op.call.args:
        return None
    first, *_ = op.call.args
    options = {"reduction": "mean", "beta": None, "delta": None} | dict(op.call.kwargs)
    plain = len(options) == 3 and options["reduction"] == "mean"
    known = graph.values.get(first.name) if isinstance(first, Ref) else None
    if known is None or known.batch_dim is None or not plain:
        return None
    if called(op.call) == "mean" and len(op.call.args) > 1:
        return None
    dims = [
        at_batch(size, 1) if is_free(size) or place != known.batch_dim else size // graph.batch_size
        for place, size in enumerate(known.dims)
    ]
    if not any(map(is_free, dims)):
        return 1
    return functools.reduce(operator.mul, (dim for dim in dims if is_free(dim)))


def _scaled(graph: Graph, op: Op) -> str | None:
    """The value that an op scales by a number that is the same in every micro-batch."""
    refs = [item for item in op.call.args if isinstance(item, Ref)]
    return refs[0].name if len(refs) == 1 and refs[0] is op.call.args[0] else None
