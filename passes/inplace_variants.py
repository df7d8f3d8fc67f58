"""Ops that have a variant which writes its result over an operand, and ops whose result may go so.

They give the same bits, forward and backward. Dropout is none of them: out of place, a GPU keeps a
mask of one byte per element and draws it in a fused kernel; in place, it draws other numbers, and
keeps them in the type of the operand.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from gpipe_compiler.ir import Call, FunctionCall, Graph, MethodCall, ModuleCall, ModuleSpec, Op, Ref
from gpipe_compiler.passes.verbs import verb, writes


@dataclass(frozen=True, slots=True)
class Variant:
    """An op that writes in place.

    Attributes:
        operand: the value that it writes over.
        other: what it reads besides, where that decides the type of the result; None for numbers.
        spec: for a module, how it is made anew.
    """

    operand: str
    call: Call
    other: object = None
    spec: ModuleSpec | None = None


_SAME_GRADIENT: Mapping[type[nn.Module], Callable[..., Any]] = {
    nn.ReLU: F.relu,
    nn.ReLU6: F.relu6,
    nn.Hardtanh: F.hardtanh,
    nn.LeakyReLU: F.leaky_relu,
}
"""The gradient in place is that out of place: what is above zero in the argument is so in the
result, and what is between the ends of a hard tanh too."""

_WITHOUT_GRADIENT: Mapping[type[nn.Module], Callable[..., Any]] = {
    **_SAME_GRADIENT,
    nn.CELU: F.celu,
    nn.ELU: F.elu,
    nn.Hardsigmoid: F.hardsigmoid,
    nn.Hardswish: F.hardswish,
    nn.Mish: F.mish,
    nn.SELU: F.selu,
    nn.SiLU: F.silu,
    nn.Threshold: F.threshold,
}
"""For a gradient these would keep a copy of the operand, or compute it in another way."""

_ACTIVATIONS, _ACTIVATIONS_WITHOUT_GRADIENT = (
    frozenset[object]({*table, *table.values()}) for table in (_SAME_GRADIENT, _WITHOUT_GRADIENT)
)

_METHODS = frozenset({"exp", "masked_fill", "neg", "relu", "sigmoid", "sqrt", "tanh"})
"""Methods that have an in-place variant, and keep for a gradient at most the result."""

_METHODS_WITHOUT_GRADIENT = _METHODS | {"abs", "clamp", "clamp_max", "clamp_min", "square"}

_AUGMENTED: Mapping[str, Callable[..., Any]] = {
    "add": operator.iadd,
    "sub": operator.isub,
    "mul": operator.imul,
    "div": operator.itruediv,
}
_COMMUTE = frozenset({"add", "mul"})


def variants(graph: Graph, op: Op) -> Iterator[Variant]:
    """The variants of an op, the one that reads most like it first."""
    training = graph.loss is not None
    activations = _ACTIVATIONS if training else _ACTIVATIONS_WITHOUT_GRADIENT
    methods = _METHODS if training else _METHODS_WITHOUT_GRADIENT
    made, name = op.call, _verb(op)
    match made:
        case FunctionCall() | MethodCall() if name in _AUGMENTED:
            if len(made.args) == 2 and not made.kwargs:
                yield from _binary_variants(name, made.args)
        case ModuleCall(module=path, args=(Ref(name=operand),)) if not made.kwargs:
            spec = graph.modules[path]
            if spec.cls in activations and not _passes_inplace(spec.cls, spec.args, spec.kwargs):
                kwargs = {**spec.kwargs, "inplace": True}
                yield Variant(operand, made, spec=dataclasses.replace(spec, kwargs=kwargs))
        case FunctionCall(function=function, args=(Ref(name=operand), *_)) if (
            function in activations
        ):
            if not _passes_inplace(function, made.args, made.kwargs):
                kwargs = {**made.kwargs, "inplace": True}
                yield Variant(operand, dataclasses.replace(made, kwargs=kwargs))
        case (
            FunctionCall(args=(Ref(name=operand), *_)) | MethodCall(args=(Ref(name=operand), *_))
        ) if name in methods and "out" not in made.kwargs:
            yield Variant(operand, MethodCall(f"{name}_", made.args, made.kwargs))


def functional(call: Call, spec: ModuleSpec) -> FunctionCall | None:
    """The variant of one of several calls of a module, where the others stay as they are."""
    return FunctionCall(F.relu, call.args, {"inplace": True}) if spec.cls is nn.ReLU else None


def _passes_inplace(
    called: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool:
    """Whether a call says already if it is to be in place."""
    parameters = list(inspect.signature(called).parameters)
    return "inplace" in kwargs or len(args) > parameters.index("inplace")


def _binary_variants(name: str, args: tuple[object, ...]) -> Iterator[Variant]:
    orders = (args, args[::-1]) if name in _COMMUTE else (args,)
    for target, other in orders:
        if isinstance(target, Ref) and target != other:
            yield Variant(target.name, FunctionCall(_AUGMENTED[name], (target, other)), other)


# --- what may be written over ----------------------------------------------------------------

_CONVOLUTIONS: frozenset[object] = frozenset(
    {
        *(getattr(nn, f"Conv{n}d") for n in (1, 2, 3)),
        *(getattr(nn, f"ConvTranspose{n}d") for n in (1, 2, 3)),
        *(getattr(F, f"conv{n}d") for n in (1, 2, 3)),
        *(getattr(F, f"conv_transpose{n}d") for n in (1, 2, 3)),
    }
)
_PRODUCTS: frozenset[object] = frozenset(
    {
        *(nn.Linear, F.linear, operator.matmul),
        *(torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm),
        *("matmul", "bmm", "mm", "addmm", "baddbmm"),
    }
)
_ARITHMETIC = frozenset({*_AUGMENTED, "neg", "masked_fill"})
"""By what they do (`_verb`)."""

_TYPE_FOLLOWS: frozenset[object] = frozenset(
    {
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, F.batch_norm, torch.cat, torch.stack),
        *(nn.MaxPool1d, nn.MaxPool2d, F.max_pool1d, F.max_pool2d),
        *(nn.AvgPool2d, F.avg_pool2d),
    }
)
"""Autocast leaves these in the type that they are given, on every kind of device."""

_NEW: frozenset[object] = frozenset(
    {
        *_CONVOLUTIONS,
        *_PRODUCTS,
        *_TYPE_FOLLOWS,
        *(nn.GroupNorm, nn.LayerNorm, F.group_norm, F.layer_norm),
        *(getattr(nn, f"InstanceNorm{n}d") for n in (1, 2, 3)),
        *(getattr(nn, f"AdaptiveAvgPool{n}d") for n in (1, 2, 3)),
        *(getattr(F, f"adaptive_avg_pool{n}d") for n in (1, 2, 3)),
        *(nn.MaxPool3d, nn.AvgPool3d, F.max_pool3d, F.avg_pool3d),
        *(nn.Embedding, F.embedding, nn.Upsample, F.interpolate, F.pad, F.instance_norm),
    }
)
"""They return memory of their own, and keep nothing of it for the backward, on any device."""

_NEW_BUT_KEPT: frozenset[object] = frozenset(
    {
        *_ACTIVATIONS_WITHOUT_GRADIENT,
        *(nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax),
        *(F.gelu, F.softmax, torch.softmax, "softmax", F.log_softmax, "log_softmax"),
    }
)
"""They return memory of their own, which some keep for the backward on some devices."""

_DROPOUTS: frozenset[object] = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout}
)


def makes_new(graph: Graph, op: Op) -> bool:
    """Whether what an op returns is its own, and nobody's when its one reader has read it."""
    called, name = _called(graph, op), _verb(op)
    if called in _NEW or name in _ARITHMETIC:
        return True
    kept = called in _NEW_BUT_KEPT or name in _METHODS_WITHOUT_GRADIENT
    return graph.loss is None and kept


def may_return_its_argument(graph: Graph, op: Op) -> bool:
    """Whether an op is dropout, which returns a new tensor in one mode and its argument in the
    other."""
    called = _called(graph, op)
    return called in _DROPOUTS or (isinstance(called, type) and issubclass(called, _DropoutNd))


def half_precision(graph: Graph) -> frozenset[str]:
    """The values that autocast makes of 16 bits, on every kind of device."""
    found: set[str] = set()

    def half(argument: object) -> bool:
        if isinstance(argument, list | tuple):
            return all(map(half, argument))
        return isinstance(argument, int | float) or (
            isinstance(argument, Ref) and argument.name in found
        )

    for op in graph.ops:
        called = _called(graph, op)
        made = called in _CONVOLUTIONS or called in _PRODUCTS
        if _verb(op) in _ARITHMETIC:
            made = half(op.call.args)
        elif called in _TYPE_FOLLOWS or called in _ACTIVATIONS:
            made = half(op.call.args[:1])
        if made:
            found.update(op.outputs)
    return frozenset(found)


def _verb(op: Op) -> str:
    """What an op does that makes a tensor of its own; "" for one that writes in place already."""
    return "" if writes(op) else verb(op)


def _called(graph: Graph, op: Op) -> object:
    match op.call:
        case FunctionCall(function=function):
            return function
        case MethodCall(method=method):
            return method
        case ModuleCall(module=path):
            return graph.modules[path].cls
