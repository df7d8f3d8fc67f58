"""The loss functions of torch in a graph: what they are means over."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    Mode,
    ModuleCall,
    Op,
    Reduction,
    Ref,
    StateRef,
    called,
)
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.interpret import construct
from gpipe_compiler.passes.unknown_sizes import selection_behind
from gpipe_compiler.passes.verbs import MOVES, ORDER, elements_of, origin, verb

_LINEAR_LOSS = getattr(F, "linear_cross_entropy", None)
"""Cross entropy fused with the head; torch 2.11 does not have it."""

_LOSSES: tuple[object, ...] = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
if _LINEAR_LOSS is not None:
    _LOSSES += (_LINEAR_LOSS,)


@dataclass(frozen=True, slots=True)
class Targets:
    """A mean over targets: those that are no `ignored` class, each weighing what its class does.

    Attributes:
        weights: the weights of the classes, None where each is one.
    """

    op: Op
    targets: Argument
    ignored: int
    weights: Argument


def mean_over_targets(graph: Graph, op: Op) -> Targets | None:
    """What a loss of class numbers is a mean over; None for any other op, and for no mean.

    Targets that are probabilities of classes all count, whatever they weigh: torch divides by
    their number, which goes with that of the samples.
    """
    options = loss_arguments(graph, op) if is_of_classes(graph, op) else None
    if options is None or options["reduction"] != "mean":
        return None
    targets = options["target"]
    known = graph.values.get(targets.name) if isinstance(targets, Ref) else None
    if known is None or known.dtype is None or known.dtype.is_floating_point:
        return None
    ignored = options["ignore_index"]
    return Targets(op, targets, -100 if ignored is None else ignored, options["weight"])


_REDUCTIONS: Mapping[str | None, Reduction] = {
    "mean": Reduction.MEAN,
    "batchmean": Reduction.MEAN,
    "sum": Reduction.SUM,
}


def reduction_of(graph: Graph, op: Op) -> Reduction | None:
    """How one of torch's losses adds up its samples; None for any other op, and for neither.

    The means of all but those of class numbers divide by what goes with the number of samples;
    `batchmean` divides by the first size, which is another one where samples lie elsewhere.
    """
    options = loss_arguments(graph, op)
    if options is None:
        return None
    first = graph.values.get(getattr(options.get("input"), "name", ""))
    elsewhere = first is not None and first.batch_dim not in (None, 0)
    reduction = "sum" if options["reduction"] == "batchmean" and elsewhere else options["reduction"]
    return _REDUCTIONS.get(reduction)


def is_of_classes(graph: Graph, op: Op) -> bool:
    """Whether an op is a loss of class numbers, or of probabilities of classes."""
    match op.call:
        case FunctionCall(function=function):
            return function in _LOSSES
        case ModuleCall(module=path):
            return graph.modules[path].cls in _LOSSES
    return False


def loss_arguments(graph: Graph, op: Op) -> Mapping[str, Any] | None:
    """The arguments of one of torch's losses by name; None for any other op.

    Of a module, what it was made with is among them, and its weights.
    """
    match op.call:
        case FunctionCall(function=function, args=args, kwargs=kwargs) if _is_loss(function):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            return {**bound.arguments, "reduction": _modern(bound.arguments)}
        case ModuleCall(module=path, args=args, kwargs=kwargs):
            spec = graph.modules[path]
            if issubclass(spec.cls, nn.modules.loss._Loss):
                module: Any = construct(spec)
                given = inspect.signature(spec.cls.forward).bind(None, *args, **kwargs).arguments
                own = {"weight": None, "ignore_index": getattr(module, "ignore_index", None)}
                states = {name: StateRef(state) for name, state in spec.state.items()}
                return {**own, **given, **states, "reduction": str(module.reduction)}
    return None


def _is_loss(function: Callable[..., object]) -> bool:
    name = getattr(function, "__name__", "")
    return getattr(F, name, None) is function and "reduction" in _parameters(function)


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # not written in Python
        return {}


def _modern(options: Mapping[str, Any]) -> str:
    """The reduction, also where it is asked for by the arguments of old."""
    average, reduce = options.get("size_average"), options.get("reduce")
    if average is None and reduce is None:
        return str(options["reduction"])
    return str(nn._reduction.legacy_get_string(average, reduce))


# --- the terms of a loss: what they are, and how each goes into it -------------------------------


@dataclass(frozen=True, slots=True)
class Division:
    """A sum over samples, or their mean, divided by a value that depends on the batch.

    Attributes:
        total: whether it is known to be a sum (True) or a mean (False).
    """

    op: Op
    divisor: str
    total: bool | None


@dataclass(frozen=True, slots=True)
class ConstantTerm:
    """What depends on no sample, such as the size of the weights: it counts once."""


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else.

    Attributes:
        kind: whether it is known to be a sum over samples, or their mean; None where unknown.
    """

    op: Op | None
    kind: Reduction | None


@dataclass(frozen=True, slots=True)
class Selected:
    """The mean over what a mask selects.

    Attributes:
        mask: a value of booleans.
    """

    op: Op
    mask: Ref


@dataclass(frozen=True, slots=True)
class Guarded:
    """A term that counts only where something has been counted: `where(n > 0, term, 0)`.

    Attributes:
        counted: the scalar that has to be above 0; None for what the term itself is a mean over,
            without which it is no number: `where(term.isfinite(), term, 0)`.
    """

    op: Op
    counted: str | None
    inner: Summand


Term = Targets | Division | Selected | Guarded | ConstantTerm | Other

Step = FunctionCall | MethodCall
LAST = Ref("")
"""In a step, its operand."""


def put(args: Argument, last: Argument) -> Argument:
    """The arguments of a step that is done to this."""
    return map_argument(lambda leaf: last if leaf == LAST else leaf, args)


def done_elsewhere(op: Op, factor: Ref) -> Step:
    """The call of an op, done to another value than the scalar that it is done to, in no place."""
    call = op.call
    assert isinstance(call, FunctionCall | MethodCall)
    args = map_argument(lambda leaf: LAST if leaf == factor else leaf, call.args)
    if isinstance(call, MethodCall):
        return dataclasses.replace(call, method=call.method.removesuffix("_"), args=args)
    return dataclasses.replace(call, args=args)


@dataclass(frozen=True, slots=True)
class Summand:
    """A term, and how it goes into the loss.

    Attributes:
        value: the name of its scalar in the graph, a number, or a tensor of the model's.
        scale: what the loss does to it besides adding it: what it does to sums of terms.
        mode: in which it goes into the loss.
    """

    term: Term
    value: str | float | StateRef
    scale: tuple[Step, ...] = ()
    mode: Mode = Mode.ALWAYS


# --- means over what a mask selects ---------------------------------------------------------------


def mask_of_mean(graph: Graph, op: Op) -> Ref | None:
    """The mask that selects all elements that an op is the mean of; None for any other op."""
    plain = verb(op) == "mean" and len(op.call.args) == 1 and not op.call.kwargs
    if not plain and reduction_of(graph, op) is not Reduction.MEAN:
        return None
    masks = [mask_behind(graph, name) for name in op.inputs if name in graph.batched]
    first = masks[0] if masks else None
    return first if first is not None and _all_alike(graph, masks) else None


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
    return masks[0] if masks and alike and _all_alike(graph, masks) else None


def _all_alike(graph: Graph, masks: Sequence[Ref | None]) -> bool:
    first, *others = masks
    return all(mask == first or _alike(graph, mask, first) for mask in others)


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


# --- sums to which only what counts adds anything -------------------------------------------------


def vanishes(graph: Graph, op: Op, counted: Argument) -> bool:
    """Whether what an op adds up is known to be 0 where nothing is counted.

    Args:
        counted: the value whose sum is the count, such as a mask.
    """
    rows = graph.producer.get(_plain(graph, counted))
    if rows is None:
        known = graph.values.get(_plain(graph, counted))
        mask = known is not None and known.dtype is torch.bool
    else:
        mask = verb(rows) in ORDER or verb(rows) in ("eq", "ne")
    return mask and _is_masked(graph, op, counted)


def _is_masked(graph: Graph, op: Op | None, mask: Argument) -> bool:
    """Whether what an op makes of rows is 0 for those that a mask leaves out."""
    if op is None or not op.call.args:
        return False
    args = [item for item in op.call.args if isinstance(item, Ref)]
    makers = [graph.producer.get(item.name) for item in args]
    match verb(op):
        case "mul" | "dot":
            same = any(_alike(graph, item, mask) for item in args)
            return same or any(_is_masked(graph, maker, mask) for maker in makers)
        case "where" if len(op.call.args) == 3 and op.call.args[2] == 0:
            return _alike(graph, op.call.args[0], mask)
        case "getitem" | "masked_select" if len(op.call.args) == 2:
            return _alike(graph, op.call.args[1], mask) or _is_masked(graph, makers[0], mask)
        case "sum" | "mean" | "div" | "neg" | "pow" | "square" | "abs":
            return _is_masked(graph, makers[0], mask)
        case name if name in MOVES and makers:
            return _is_masked(graph, makers[0], mask)
        case _:
            return is_of_classes(graph, op) and _ignores(graph, op, mask)


def _ignores(graph: Graph, op: Op, mask: Argument) -> bool:
    """Whether a loss of classes leaves out the targets that a mask of others leaves out."""
    options, maker = loss_arguments(graph, op), graph.producer.get(_plain(graph, mask))
    if options is None or maker is None or verb(maker) != "ne" or len(maker.call.args) != 2:
        return False
    targets, ignored = maker.call.args
    same = elements_of(graph, options["target"]) == elements_of(graph, targets)
    return same and bool(ignored == options["ignore_index"])


def _alike(graph: Graph, one: Argument, other: Argument) -> bool:
    """Whether two values are the same numbers, but for their types and shapes."""
    left, right = _plain(graph, one), _plain(graph, other)
    if not left or left == right:
        return bool(left)
    calls = [maker.call for name in (left, right) if (maker := graph.producer.get(name))]
    if len(calls) < 2 or calls[0] == calls[1]:
        return len(calls) == 2
    first, second = calls
    plain = all(isinstance(call, FunctionCall | MethodCall) for call in calls)
    return (
        plain
        and (called(first), first.kwargs) == (called(second), second.kwargs)
        and len(first.args) == len(second.args)
        and all(a == b or _alike(graph, a, b) for a, b in zip(first.args, second.args, strict=True))
    )


def _plain(graph: Graph, value: Argument) -> str:
    """The name of a value before it was given another type or shape; "" for none."""
    moves = MOVES - {"getitem", "select"}
    return origin(graph, getattr(value, "name", ""), lambda op: verb(op) in moves)
