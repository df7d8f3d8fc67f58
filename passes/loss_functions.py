"""The loss functions of torch in a graph: what they are means over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    ModuleCall,
    Op,
    Reduction,
    Ref,
    StateRef,
)
from gpipe_compiler.ir.interpret import construct

_LINEAR_LOSS = getattr(F, "linear_cross_entropy", None)
"""Cross entropy fused with the head; torch 2.11 does not have it."""

_LOSSES: tuple[object, ...] = (F.cross_entropy, F.nll_loss)
if _LINEAR_LOSS is not None:
    _LOSSES += (_LINEAR_LOSS,)
_LOSS_MODULES: Mapping[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
}


@dataclass(frozen=True, slots=True)
class Targets:
    """A mean over targets: those that are no `ignored` class, each weighing what its class does.

    Attributes:
        targets: the class numbers.
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
    options = loss_options(graph, op)
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

    The means of all but those of class numbers divide by what goes with the number of samples.
    """
    return _REDUCTIONS.get(reduction_option(graph, op))


def reduction_option(graph: Graph, op: Op) -> str | None:
    """The `reduction` of one of torch's losses; None for any other op."""
    match op.call:
        case FunctionCall(function=function, args=args, kwargs=kwargs) if _is_loss(function):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            return _modern(bound.arguments)
        case ModuleCall(module=path):
            spec = graph.modules[path]
            if issubclass(spec.cls, nn.modules.loss._Loss):
                module: Any = construct(spec)
                return str(module.reduction)
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


def loss_arguments(graph: Graph, op: Op) -> Mapping[str, Any]:
    """The arguments of one of torch's losses by name; of a module, its weights among them."""
    call = op.call
    if isinstance(call, FunctionCall):
        return inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
    assert isinstance(call, ModuleCall)
    spec = graph.modules[call.module]
    given = inspect.signature(spec.cls.forward).bind(None, *call.args, **call.kwargs).arguments
    return {**given, **{name: StateRef(state) for name, state in spec.state.items()}}


def loss_options(graph: Graph, op: Op) -> Mapping[str, Any] | None:
    """The arguments of a loss of classes by name; None for any other op."""
    match op.call:
        case FunctionCall(function=function, args=args, kwargs=kwargs) if function in _LOSSES:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
        case ModuleCall(module=path, args=args, kwargs=kwargs):
            spec = graph.modules[path]
            if spec.cls not in _LOSS_MODULES:
                return None
            bound = inspect.signature(_LOSS_MODULES[spec.cls]).bind(*args, **kwargs)
            bound.apply_defaults()
            module: Any = construct(spec)
            weight = StateRef(spec.state["weight"]) if "weight" in spec.state else None
            own = {"reduction": module.reduction, "ignore_index": module.ignore_index}
            options = bound.arguments | own | {"weight": weight}
        case _:
            return None
    return {**options, "reduction": _modern(options)}
