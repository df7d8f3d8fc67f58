"""The aten operators that are written as functions of torch.nn.functional.

Source of the functions' arguments: torch/nn/functional.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F

from gpipe_compiler.frontend.aten_call import Argument, AtenCall, Rule, Written

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

FUNCTIONS: Mapping[str, Rule] = {
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
    **{name: _same_order(function) for name, function in _ACTIVATIONS.items()},
    **{f"{name}_": _inplace(function) for name, function in _ACTIVATIONS.items()},
}
"""A rule for each operator by name."""
