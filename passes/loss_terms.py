"""Takes a loss apart: into terms that are added, and what each term's own mean is taken over.

From the loss the walk goes backwards through what only scales or adds: casts, views of a scalar,
numbers, and factors that are the same for every micro-batch. It ends at the loss functions of
torch, at divisions, and at everything that it does not know.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    StateRef,
    Value,
    ValueKind,
)
from gpipe_compiler.ir.interpret import construct
from gpipe_compiler.passes.duplicate import shape_values

_OPERATORS: Mapping[Callable[..., object], str] = {
    operator.add: "add",
    operator.iadd: "add",
    operator.sub: "sub",
    operator.isub: "sub",
    operator.mul: "mul",
    operator.imul: "mul",
    operator.truediv: "div",
    operator.itruediv: "div",
    operator.neg: "neg",
    operator.pos: "clone",
}

_SAME = frozenset(
    {
        *("reshape", "view", "view_as", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"),
        *("float", "double", "half", "bfloat16", "to", "type", "type_as", "detach"),
    }
)
"""What leaves a scalar what it is, but for its type and its shape."""

_LINEAR_LOSS = getattr(F, "linear_cross_entropy", None)
"""Cross entropy fused with the head; torch 2.11 does not have it."""

_LOSSES: tuple[object, ...] = (F.cross_entropy, F.nll_loss)
if _LINEAR_LOSS is not None:
    _LOSSES += (_LINEAR_LOSS,)
_LOSS_MODULES: Mapping[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
}


def verb(op: Op) -> str:
    """What an op does, however it is written: `add` for `a + b`, `a += b`, `torch.add(a, b)`."""
    match op.call:
        case FunctionCall(function=function) if function in _OPERATORS:
            return _OPERATORS[function]
        case FunctionCall(function=function):
            name = getattr(function, "__name__", "")
            return _plain(name) if getattr(torch, name, None) is function else ""
        case MethodCall(method=method):
            return _plain(method.removesuffix("_"))
        case _:
            return ""


def _plain(name: str) -> str:
    synonyms = {"true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}
    return synonyms.get(name, name)


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
class Constant:
    """What depends on no sample, such as the size of the weights: every weighing will do."""

    value: str


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else: a mean over samples, as far as one can tell."""

    op: Op | None


Term = Targets | Division | Constant | Other


@dataclass(frozen=True)
class Terms:
    """The terms of the loss of an annotated graph."""

    graph: Graph

    def __iter__(self) -> Iterator[Term]:
        assert self.graph.loss is not None
        yield from self._terms(self.graph.loss.value)

    @cached_property
    def batched(self) -> frozenset[str]:
        """The values that depend on an input with a batch dimension, be it on its shape alone."""
        found = {source.name for source in self.graph.inputs if source.batched}
        for op in self.graph.ops:
            if not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def _shapes(self) -> Mapping[str, Argument]:
        return shape_values(self.graph)

    def same_for_all(self, argument: Argument) -> bool:
        """Whether an argument is one and the same for every micro-batch."""
        match argument:
            case bool() | int() | float() | StateRef():
                return True
            case Ref(name=name) if name not in self.batched:
                return True
            case Ref(name=name):
                known = self.value(argument)
                is_number = known is not None and known.kind is ValueKind.SCALAR
                return is_number and isinstance(self._shapes.get(name), int | float)
            case _:
                return False

    def value(self, argument: Argument) -> Value | None:
        """What is known of an argument; None for anything but a value."""
        return self.graph.values.get(argument.name) if isinstance(argument, Ref) else None

    def keeps(self, op: Op) -> bool:
        """Whether an op makes a scalar of a scalar that differs in no more than type and shape."""
        return verb(op) in _SAME and self.is_scalar(op.call.args[0])

    def is_scalar(self, argument: Argument) -> bool:
        """Whether an argument is a tensor of one element, however many samples there are."""
        known = self.value(argument)
        return (
            known is not None
            and known.kind is ValueKind.TENSOR
            and known.batch_dim is None
            and known.splittable
            and torch.Size(known.shape).numel() == 1
        )

    def _terms(self, value: str) -> Iterator[Term]:
        if value not in self.batched:
            yield Constant(value)
            return
        op = self.graph.producer.get(value)
        if op is None or op.result != value:
            yield Other(op)
            return
        args = op.call.args
        match verb(op):
            case _ if self.keeps(op):
                yield from self._terms(args[0].name)
            case "neg":
                yield from self._scaled(op, args[0])
            case "add" | "sub" if self._are_scalars(args) and not _tensor_options(op):
                yield from self._added(args)
            case "mul" if len(args) == 2 and self.same_for_all(args[1]):
                yield from self._scaled(op, args[0])
            case "mul" if len(args) == 2 and self.same_for_all(args[0]):
                yield from self._scaled(op, args[1])
            case "div" if len(args) == 2 and not op.call.kwargs:
                yield from self._divided(op, *args)
            case "sum" | "mean" if isinstance(args[0], Ref):
                yield from self._reduced(op, args[0].name)
            case _:
                yield mean_over_targets(self.graph, op) or Other(op)

    def _are_scalars(self, args: tuple[Argument, ...]) -> bool:
        return len(args) == 2 and all(
            self.is_scalar(item) or not isinstance(item, Ref) for item in args
        )

    def _added(self, args: tuple[Argument, ...]) -> Iterator[Term]:
        for item in args:
            if isinstance(item, Ref):
                yield from self._terms(item.name)

    def _scaled(self, op: Op, factor: Argument) -> Iterator[Term]:
        if self.is_scalar(factor):
            yield from self._terms(factor.name)
        else:
            yield Other(op)

    def _divided(self, op: Op, dividend: Argument, divisor: Argument) -> Iterator[Term]:
        if self.same_for_all(divisor):
            yield from self._scaled(op, dividend)
        elif self.is_scalar(dividend) and self.is_scalar(divisor):
            yield Division(op, divisor.name, self._is_sum(dividend.name))
        else:
            yield Other(op)

    def _reduced(self, op: Op, value: str) -> Iterator[Term]:
        """The sum or the mean of a scalar, of scalars in a row, or of a quotient."""
        maker = self.graph.producer.get(value)
        if self.is_scalar(Ref(value)):
            yield from self._terms(value)
        elif maker is None:
            yield Other(op)
        elif verb(maker) == "stack" and isinstance(maker.call.args[0], tuple | list):
            for item in maker.call.args[0]:
                yield from self._scaled(op, item)
        elif verb(maker) == "div" and not maker.call.kwargs and self.is_scalar(maker.call.args[1]):
            divisor = maker.call.args[1]
            if self.same_for_all(divisor):
                yield Other(op)
            else:
                yield Division(op, divisor.name, verb(op) == "sum")
        else:
            yield Other(op)

    def _is_sum(self, value: str) -> bool | None:
        """Whether a scalar is a sum over samples (True) or their mean; None where unknown."""
        op = self.graph.producer.get(value)
        if op is None:
            return None
        name, args = verb(op), op.call.args
        if self.keeps(op):
            return self._is_sum(args[0].name)
        if name in ("mul", "div") and len(args) == 2 and self.same_for_all(args[1]):
            return self._is_sum(args[0].name) if self.is_scalar(args[0]) else None
        if name in ("sum", "mean"):
            return name == "sum"
        options = loss_options(self.graph, op)
        return None if options is None else options["reduction"] == "sum"


def _tensor_options(op: Op) -> bool:
    """Whether an op has options that depend on tensors (`alpha=`)."""
    return any(isinstance(item, Ref) for item in op.call.kwargs.values())


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
    if options.get("size_average") is not None or options.get("reduce") is not None:
        legacy = nn._reduction.legacy_get_string(options["size_average"], options["reduce"])
        options = {**options, "reduction": legacy}
    return options
