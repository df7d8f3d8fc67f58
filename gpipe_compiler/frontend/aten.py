"""What a person writes for a call of an aten operator.

`write(call)` gives the torch function, tensor method or Python operator that dispatches to the same
operator with the same arguments. A rule stands here only where both sides are the same program;
`tests/frontend/test_readable.py` holds every rule against the operator itself. An operator without
a rule stays the call of `torch.ops` that it is.

Sources: aten/src/ATen/native/native_functions.yaml for the operators' signatures and
torch/nn/functional.py for those of the functions.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

Argument = Any
"""An argument of a torch.fx call: a node, a constant, or a nest of them."""


@dataclass(frozen=True)
class Written:
    """A call as it is written: of a function, or of the tensor method of that name."""

    target: Callable[..., Any] | str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True)
class AtenCall:
    """A call of an aten operator, its arguments bound to the names of the schema.

    Attributes:
        values: every argument by name, defaults filled in.
        defaults: names of the arguments that equal their default.
    """

    overload: torch._ops.OpOverload
    values: Mapping[str, Argument]
    defaults: frozenset[str]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload: `add_`."""
        return self.overload._schema.name.partition("::")[2]

    def __getitem__(self, name: str) -> Argument:
        return self.values[name]

    def positional(self, *, skip: Sequence[str] = ()) -> tuple[Argument, ...]:
        """Positional arguments up to the last that differs from its default."""
        names = [a.name for a in self.overload._schema.arguments if not a.kwarg_only]
        names = [name for name in names if name not in skip]
        while names and names[-1] in self.defaults:
            names.pop()
        return tuple(self.values[name] for name in names)

    def keywords(self, *, skip: Sequence[str] = ()) -> dict[str, Argument]:
        """Keyword-only arguments that differ from their default."""
        return {
            a.name: self.values[a.name]
            for a in self.overload._schema.arguments
            if a.kwarg_only and a.name not in self.defaults and a.name not in skip
        }

    def given(self, *names: str, **renamed: str) -> dict[str, Argument]:
        """Those of the arguments that differ from their default, by name or `new=old`."""
        pairs = [*((name, name) for name in names), *renamed.items()]
        return {new: self.values[old] for new, old in pairs if old not in self.defaults}


def bind(
    overload: torch._ops.OpOverload, args: Sequence[Argument], kwargs: Mapping[str, Argument]
) -> AtenCall:
    """A call's arguments under the names of the schema."""
    values: dict[str, Argument] = {}
    defaults: set[str] = set()
    for index, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else _MISSING
        if index < len(args) and not argument.kwarg_only:
            value = args[index]
        else:
            value = kwargs.get(argument.name, default)
        values[argument.name] = value
        if _same(value, default):
            defaults.add(argument.name)
    return AtenCall(overload, values, frozenset(defaults))


_MISSING = object()


def _same(value: Argument, default: Argument) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return len(value) == len(default) and all(map(_same, value, default))
    return type(value) is type(default) and bool(value == default)


Rule = Callable[[AtenCall], "Written | None"]
"""How one operator is written; None where this call of it has no better form."""


# --- Python operators -----------------------------------------------------------------------------

_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "neg": operator.neg,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
}


def _operator(call: AtenCall) -> Written | None:
    """`a + b`; a third argument (`alpha`, `rounding_mode`) has no place in an operator."""
    if call.keywords() or len(call.positional()) > 2:
        return None
    return Written(_OPERATORS[call.name], call.positional())


def _rsub(call: AtenCall) -> Written | None:
    if "alpha" not in call.defaults:
        return None
    return Written(operator.sub, (call["other"], call["self"]))


# --- Tensor methods -------------------------------------------------------------------------------

_METHODS = frozenset(
    {
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten"),
        *("expand", "expand_as", "repeat", "squeeze", "unsqueeze", "t", "clone", "detach"),
        *("type_as", "masked_fill", "masked_scatter", "mean", "sum", "prod", "std", "var", "amax"),
        *("amin", "max", "min", "argmax", "argmin", "all", "any", "cumsum", "chunk", "split"),
        *("unbind", "tril", "triu", "view_as", "reshape_as", "size", "new_zeros", "new_ones"),
        *("new_empty", "new_full", "softmax", "log_softmax", "index_select", "gather", "scatter"),
        *("scatter_add", "index_add", "index_fill", "index_copy", "narrow", "movedim", "swapaxes"),
        *("roll", "repeat_interleave", "diagonal", "unfold", "select", "slice", "logsumexp"),
        *("topk", "sort", "argsort", "item", "numel", "clamp", "clamp_min", "clamp_max"),
        *("resolve_conj", "adjoint"),
    }
)
"""Operators that read better as methods."""

_SPREAD = frozenset({"view", "reshape", "permute", "expand", "repeat"})
"""Methods that take a list of sizes or dimensions as separate arguments."""

_SIZES = frozenset({"size", "shape", "dims", "repeats"})


def _method(call: AtenCall) -> Written | None:
    """`x.name(...)`."""
    positional = _unwrapped(call)
    if call.name in _SPREAD and len(positional) > 1 and isinstance(positional[1], (list, tuple)):
        positional = (positional[0], *positional[1], *positional[2:])
    return Written(call.name, positional, _keywords(call))


def _unwrapped(call: AtenCall) -> tuple[Argument, ...]:
    """Positional arguments; the list of a single dimension becomes the dimension."""
    arguments = [a for a in call.overload._schema.arguments if not a.kwarg_only]
    return tuple(
        value[0] if _is_single_dim(argument, value) else value
        for argument, value in zip(arguments, call.positional(), strict=False)
    )


def _is_single_dim(argument: Any, value: Argument) -> bool:
    return argument.name == "dim" and isinstance(value, (list, tuple)) and len(value) == 1


def _keywords(call: AtenCall) -> dict[str, Argument]:
    """Keyword-only arguments; the usual layout and kind of memory go without saying."""
    usual = {"layout": torch.strided, "pin_memory": False}
    return {
        key: value
        for key, value in call.keywords().items()
        if key not in usual or value is not usual[key]
    }


def _to(call: AtenCall) -> Written | None:
    """`x.to(dtype)`; a device is added by whoever knows that it is another one."""
    dtype = call.values.get("dtype")
    kwargs = call.given("copy", "memory_format") if "copy" in call.values else {}
    if call.name == "_to_copy":
        kwargs = call.given("memory_format") | {"copy": True}
    return Written("to", (call["self"],) if dtype is None else (call["self"], dtype), kwargs)


def _to_other(call: AtenCall) -> Written | None:
    return Written("to", (call["self"], call["other"]), call.given("copy", "memory_format"))


def _clone(call: AtenCall) -> Written | None:
    return Written("clone", (call["self"],))


def _size(call: AtenCall) -> Written | None:
    return Written("size", (call["self"], call["dim"]))


def _numel(call: AtenCall) -> Written | None:
    return Written("numel", (call["self"],))


# --- torch.nn.functional --------------------------------------------------------------------------

_REDUCTIONS = ("none", "mean", "sum")


def _reduction(call: AtenCall) -> dict[str, Argument]:
    name = _REDUCTIONS[call["reduction"]]
    return {} if name == "mean" else {"reduction": name}


def _function(function: Callable[..., Any], *names: str, **renamed: str) -> Rule:
    """`function(self, name=..., new=...)`, with the arguments that differ from their default."""

    def rule(call: AtenCall) -> Written | None:
        return Written(function, (_first(call),), call.given(*names, **renamed))

    return rule


def _first(call: AtenCall) -> Argument:
    return call.values[call.overload._schema.arguments[0].name]


def _same_order(function: Callable[..., Any], *, skip: Sequence[str] = ()) -> Rule:
    """`function(...)` with the operator's own arguments in the operator's own order."""

    def rule(call: AtenCall) -> Written | None:
        return Written(function, call.positional(skip=skip), call.keywords())

    return rule


def _inplace(function: Callable[..., Any]) -> Rule:
    """`function(..., inplace=True)` for the operator whose name ends in an underscore."""

    def rule(call: AtenCall) -> Written | None:
        return Written(function, call.positional(), {"inplace": True})

    return rule


def _dropout(function: Callable[..., Any], *, inplace: bool) -> Rule:
    def rule(call: AtenCall) -> Written | None:
        kwargs = {"p": call["p"], "training": call["train"]}
        return Written(function, (call["input" if not inplace else "self"],), kwargs | extra)

    extra = {"inplace": True} if inplace else {}
    return rule


def _embedding(call: AtenCall) -> Written | None:
    kwargs = call.given("padding_idx", "scale_grad_by_freq", "sparse")
    return Written(F.embedding, (call["indices"], call["weight"]), kwargs)


def _batch_norm(call: AtenCall) -> Written | None:
    args = tuple(call[n] for n in ("input", "running_mean", "running_var", "weight", "bias"))
    kwargs = {name: call[name] for name in ("training", "momentum", "eps")}
    return Written(F.batch_norm, args, kwargs)


def _instance_norm(call: AtenCall) -> Written | None:
    args = tuple(call[n] for n in ("input", "running_mean", "running_var", "weight", "bias"))
    kwargs = {name: call[name] for name in ("use_input_stats", "momentum", "eps")}
    return Written(F.instance_norm, args, kwargs)


def _elu(call: AtenCall) -> Written | None:
    if {"scale", "input_scale"} - call.defaults:
        return None
    return Written(F.elu, call.positional(), {"inplace": True} if call.name == "elu_" else {})


def _softmax(function: Callable[..., Any]) -> Rule:
    def rule(call: AtenCall) -> Written | None:
        return Written(function, (call["self"],), {"dim": call["dim"], **call.given("dtype")})

    return rule


def _cross_entropy(call: AtenCall) -> Written | None:
    kwargs = call.given("weight", "ignore_index", "label_smoothing")
    return Written(F.cross_entropy, (call["self"], call["target"]), kwargs | _reduction(call))


def _nll_loss(call: AtenCall) -> Written | None:
    kwargs = call.given("weight", "ignore_index")
    return Written(F.nll_loss, (call["self"], call["target"]), kwargs | _reduction(call))


def _pair_loss(function: Callable[..., Any], *names: str) -> Rule:
    """A loss of an input and a target of the same shape."""

    def rule(call: AtenCall) -> Written | None:
        kwargs = call.given(*names)
        return Written(function, (call["self"], call["target"]), kwargs | _reduction(call))

    return rule


def _pool(function: Callable[..., Any], *, indices: bool) -> Rule:
    def rule(call: AtenCall) -> Written | None:
        kwargs = call.given("stride", "padding", "dilation", "ceil_mode")
        if indices:
            kwargs["return_indices"] = True
        return Written(function, (call["self"], call["kernel_size"]), kwargs)

    return rule


def _adaptive_max_pool(function: Callable[..., Any]) -> Rule:
    def rule(call: AtenCall) -> Written | None:
        return Written(function, (call["self"], call["output_size"]), {"return_indices": True})

    return rule


def _interpolate(mode: str, *, antialias: bool = False) -> Rule:
    def rule(call: AtenCall) -> Written | None:
        scales = call.values.get("scale_factors")
        kwargs: dict[str, Argument] = {}
        if call["output_size"] is not None:
            kwargs["size"] = call["output_size"]
        elif scales is not None:
            kwargs["scale_factor"] = scales
        kwargs["mode"] = mode
        if call.values.get("align_corners"):
            kwargs["align_corners"] = True
        if antialias:
            kwargs["antialias"] = True
        return Written(F.interpolate, (call["input"],), kwargs)

    return rule


def _einsum(call: AtenCall) -> Written | None:
    if "path" not in call.defaults or len(call["tensors"]) > 2:
        return None
    return Written(torch.einsum, (call["equation"], *call["tensors"]))


# --- indexing -------------------------------------------------------------------------------------


def _index(call: AtenCall) -> Written | None:
    """`x[:, indices]`; None in the list of the operator is a whole dimension."""
    entries = tuple(slice(None) if entry is None else entry for entry in call["indices"])
    return Written(operator.getitem, (call["self"], entries[0] if len(entries) == 1 else entries))


# --- the table ------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "mish": F.mish,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "selu": F.selu,
    "celu": F.celu,
    "threshold": F.threshold,
}

_FUNCTIONAL: Mapping[str, Rule] = {
    "elu": _elu,
    "elu_": _elu,
    "log_sigmoid": _same_order(F.logsigmoid),
    "glu": _same_order(F.glu),
    "layer_norm": _same_order(F.layer_norm, skip=("cudnn_enable",)),
    "group_norm": _same_order(F.group_norm, skip=("cudnn_enabled",)),
    "rms_norm": _same_order(F.rms_norm),
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "embedding": _embedding,
    "dropout": _dropout(F.dropout, inplace=False),
    "dropout_": _dropout(F.dropout, inplace=True),
    "alpha_dropout": _dropout(F.alpha_dropout, inplace=False),
    "feature_alpha_dropout": _dropout(F.feature_alpha_dropout, inplace=False),
    "softmax": _softmax(F.softmax),
    "log_softmax": _softmax(F.log_softmax),
    "cross_entropy_loss": _cross_entropy,
    "nll_loss_nd": _nll_loss,
    "mse_loss": _pair_loss(F.mse_loss),
    "l1_loss": _pair_loss(F.l1_loss),
    "smooth_l1_loss": _pair_loss(F.smooth_l1_loss, "beta"),
    "huber_loss": _pair_loss(F.huber_loss, "delta"),
    "binary_cross_entropy": _pair_loss(F.binary_cross_entropy, "weight"),
    "binary_cross_entropy_with_logits": _pair_loss(
        F.binary_cross_entropy_with_logits, "weight", "pos_weight"
    ),
    "max_pool1d": _pool(F.max_pool1d, indices=False),
    "max_pool2d": _pool(F.max_pool2d, indices=False),
    "max_pool3d": _pool(F.max_pool3d, indices=False),
    "max_pool1d_with_indices": _pool(F.max_pool1d, indices=True),
    "max_pool2d_with_indices": _pool(F.max_pool2d, indices=True),
    "max_pool3d_with_indices": _pool(F.max_pool3d, indices=True),
    "adaptive_avg_pool2d": _same_order(F.adaptive_avg_pool2d),
    "adaptive_avg_pool3d": _same_order(F.adaptive_avg_pool3d),
    "adaptive_max_pool1d": _adaptive_max_pool(F.adaptive_max_pool1d),
    "adaptive_max_pool2d": _adaptive_max_pool(F.adaptive_max_pool2d),
    "adaptive_max_pool3d": _adaptive_max_pool(F.adaptive_max_pool3d),
    "upsample_nearest1d": _interpolate("nearest"),
    "upsample_nearest2d": _interpolate("nearest"),
    "upsample_nearest3d": _interpolate("nearest"),
    "_upsample_nearest_exact1d": _interpolate("nearest-exact"),
    "_upsample_nearest_exact2d": _interpolate("nearest-exact"),
    "_upsample_nearest_exact3d": _interpolate("nearest-exact"),
    "upsample_linear1d": _interpolate("linear"),
    "upsample_bilinear2d": _interpolate("bilinear"),
    "upsample_trilinear3d": _interpolate("trilinear"),
    "upsample_bicubic2d": _interpolate("bicubic"),
    "_upsample_bilinear2d_aa": _interpolate("bilinear", antialias=True),
    "_upsample_bicubic2d_aa": _interpolate("bicubic", antialias=True),
    "pad": _same_order(F.pad),
    "constant_pad_nd": _function(F.pad, "pad", "value"),
    "im2col": _same_order(F.unfold),
    "col2im": _same_order(F.fold),
}

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_OPERATORS, _operator),
    **{name: _same_order(function) for name, function in _ACTIVATIONS.items()},
    **{f"{name}_": _inplace(function) for name, function in _ACTIVATIONS.items()},
    **_FUNCTIONAL,
    "rsub": _rsub,
    "to": _to,
    "_to_copy": _to,
    "lift_fresh_copy": _clone,
    "sym_size": _size,
    "sym_numel": _numel,
    "einsum": _einsum,
    "index": _index,
}

_PYTHON_METHODS = frozenset({"split", "unflatten"})
"""Methods written in Python whose arguments are those of the operator."""

_NAMESPACES: Mapping[str, types.ModuleType] = {
    "linalg_": torch.linalg,
    "fft_": torch.fft,
    "special_": torch.special,
}


def write(
    overload: torch._ops.OpOverload, args: Sequence[Argument], kwargs: Mapping[str, Argument]
) -> Written | None:
    """The call as a person writes it; None where there is no other way to write it."""
    if overload.namespace != "aten" or overload._overloadname.split("_")[-1] == "out":
        return None
    call = bind(overload, args, kwargs)
    if any(value is _MISSING for value in call.values.values()):
        return None
    rule = _RULES.get(call.name)
    if call.overload is torch.ops.aten.to.other:
        rule = _to_other
    written = rule(call) if rule is not None else None
    return written if written is not None else _by_name(call)


def _by_name(call: AtenCall) -> Written | None:
    """The method or function that torch generates from the operator, under the operator's name."""
    name = call.name
    if _takes_self(call) and (name in _METHODS or name.endswith("_")) and _has_method(name):
        return _method(call)
    for prefix, module in _NAMESPACES.items():
        function = getattr(module, name.removeprefix(prefix), None)
        if name.startswith(prefix) and _is_generated(function):
            return Written(function, _unwrapped(call), _keywords(call))
    for module in (torch, F):
        function = getattr(module, name, None)
        if _is_generated(function):
            return Written(function, _unwrapped(call), _keywords(call))
    if _takes_self(call) and _has_method(name):
        return _method(call)
    return None


def _takes_self(call: AtenCall) -> bool:
    arguments = call.overload._schema.arguments
    return bool(arguments) and arguments[0].name == "self" and not arguments[0].kwarg_only


def _has_method(name: str) -> bool:
    method = getattr(torch.Tensor, name, None)
    return isinstance(method, types.MethodDescriptorType) or name in _PYTHON_METHODS


def _is_generated(function: object) -> TypeGuard[Callable[..., Any]]:
    """Whether torch's code generator made the function from the operator's schema."""
    return isinstance(function, types.BuiltinFunctionType)
