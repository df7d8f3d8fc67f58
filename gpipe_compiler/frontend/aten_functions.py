"""Calls of aten operators, and those that are written as functions of torch.nn.functional.

Source of the functions' arguments: torch/nn/functional.py.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from gpipe_compiler.runtime.core.random import draws

Argument = Any
"""An argument of a torch.fx call: a node, a constant, or a nest of them."""


@dataclass(frozen=True)
class WrittenCall:
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

    def keywords(self) -> dict[str, Argument]:
        """Keyword-only arguments that differ from their default."""
        return {
            a.name: self.values[a.name]
            for a in self.overload._schema.arguments
            if a.kwarg_only and a.name not in self.defaults
        }

    def given(self, *names: str) -> dict[str, Argument]:
        """Those of the arguments that differ from their default, by name."""
        return {name: self.values[name] for name in names if name not in self.defaults}


def bind(
    overload: torch._ops.OpOverload, args: Sequence[Argument], kwargs: Mapping[str, Argument]
) -> AtenCall:
    """A call's arguments under the names of the schema."""
    values: dict[str, Argument] = {}
    defaults: set[str] = set()
    for index, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else MISSING
        if index < len(args) and not argument.kwarg_only:
            value = args[index]
        else:
            value = kwargs.get(argument.name, default)
        values[argument.name] = value
        if _same(value, default):
            defaults.add(argument.name)
    return AtenCall(overload, values, frozenset(defaults))


MISSING = object()
"""In place of an argument that has no default and is not given."""


def _same(value: Argument, default: Argument) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return len(value) == len(default) and all(map(_same, value, default))
    return type(value) is type(default) and bool(value == default)


IDLE = "gpipe_compiler_idle"
"""Key of node.meta: whether the call of a module neither writes to a tensor nor draws."""

_PURE = frozenset({operator.getitem, builtins.getattr, torch.tensor})
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@functools.cache
def writes(func: Any) -> bool:
    """Whether a kernel may write to a tensor.

    Normalisation writes running statistics though its schema does not say so.
    """
    name = str(func)
    return bool(func._schema.is_mutable) or "batch_norm" in name or "instance_norm" in name


def has_effect(node: fx.Node) -> bool:
    """Whether a node may do more than give its value: write to a tensor, or draw numbers."""
    target = node.target
    if node.op == "get_attr" or isinstance(node.meta.get("val"), _NUMBERS):
        return False
    if node.op == "call_module":
        return not node.meta.get(IDLE, False)
    if isinstance(target, torch._ops.OpOverload):
        return writes(target) or draws(target, node.args, node.kwargs)
    if str(target) in REGIONS:
        bodies = [
            getattr(node.graph.owning_module, str(item.target), None)
            for item in node.args
            if isinstance(item, fx.Node) and item.op == "get_attr"
        ]
        graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
        inner = [item for graph in graphs for item in graph.nodes]
        return any(map(has_effect, (n for n in inner if n.op not in ("placeholder", "output"))))
    return node.op != "call_function" or target not in _PURE


REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that run a graph of their own in another mode."""


Rule = Callable[[AtenCall], "WrittenCall | None"]
"""How one operator is written; None where this call of it has no better form."""


_PAIR = ("input1", "input2", "target")
_REDUCTIONS = ("none", "mean", "sum")
_NONE: Mapping[str, Any] = MappingProxyType({})


def written_as(
    target: Callable[..., Any] | str,
    *positional: str,
    keywords: Mapping[str, str] = _NONE,
    given: Sequence[str] = (),
    always: Mapping[str, Argument] = _NONE,
) -> Rule:
    """The rule for `target(...)`, a function or a method, with arguments of the operator.

    Args:
        positional: names of those that stand by position.
        keywords: those that are always passed by keyword, by the target's name for them.
        given: those that are passed by keyword where they differ from their default.
        always: further keyword arguments.
    """

    def rule(call: AtenCall) -> WrittenCall | None:
        kwargs = {new: call[old] for new, old in keywords.items()} | call.given(*given)
        return WrittenCall(target, tuple(call[name] for name in positional), kwargs | dict(always))

    return rule


def _same_order(
    function: Callable[..., Any], *, skip: Sequence[str] = (), inplace: bool = False
) -> Rule:
    """`function(...)` with the operator's own arguments in the operator's own order.

    Args:
        inplace: of the operator whose name ends in an underscore.
    """

    def rule(call: AtenCall) -> WrittenCall | None:
        kwargs = call.keywords() | ({"inplace": True} if inplace else {})
        return WrittenCall(function, call.positional(skip=skip), kwargs)

    return rule


def _elu(call: AtenCall) -> WrittenCall | None:
    if {"scale", "input_scale"} - call.defaults:
        return None
    return WrittenCall(F.elu, call.positional(), {"inplace": True} if call.name == "elu_" else {})


def _loss(
    function: Callable[..., Any], *names: str, of: Sequence[str] = ("self", "target")
) -> Rule:
    """A loss with a reduction, of an input and a target.

    torch's own functions of the operators' names reduce nothing unless they are told.

    Args:
        names: of further arguments.
        of: the operator's names of what the loss is of.
    """

    def rule(call: AtenCall) -> WrittenCall | None:
        reduction = _REDUCTIONS[call["reduction"]]
        kwargs = call.given(*names) | ({} if reduction == "mean" else {"reduction": reduction})
        return WrittenCall(function, tuple(call[name] for name in of), kwargs)

    return rule


def _dropout(function: Callable[..., Any]) -> Rule:
    return written_as(function, "input", keywords={"p": "p", "training": "train"})


def _normed(function: Callable[..., Any], training: str) -> Rule:
    states = ("running_mean", "running_var", "weight", "bias")
    named = {name: name for name in (training, "momentum", "eps")}
    return written_as(function, "input", *states, keywords=named)


def _pool(function: Callable[..., Any], *, indices: bool = False) -> Rule:
    names = ("stride", "padding", "dilation", "ceil_mode")
    always = {"return_indices": True} if indices else {}
    return written_as(function, "self", "kernel_size", given=names, always=always)


def _adaptive_max_pool(function: Callable[..., Any]) -> Rule:
    return written_as(function, "self", "output_size", always={"return_indices": True})


def _softmax(function: Callable[..., Any]) -> Rule:
    return written_as(function, "self", keywords={"dim": "dim"}, given=("dtype",))


def _interpolate(mode: str, *, antialias: bool = False) -> Rule:
    def rule(call: AtenCall) -> WrittenCall | None:
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
        return WrittenCall(F.interpolate, (call["input"],), kwargs)

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
    "batch_norm": _normed(F.batch_norm, "training"),
    "instance_norm": _normed(F.instance_norm, "use_input_stats"),
    "embedding": written_as(
        F.embedding, "indices", "weight", given=("padding_idx", "scale_grad_by_freq", "sparse")
    ),
    "dropout": _dropout(F.dropout),
    "dropout_": written_as(
        F.dropout, "self", keywords={"p": "p", "training": "train"}, always={"inplace": True}
    ),
    "alpha_dropout": _dropout(F.alpha_dropout),
    "feature_alpha_dropout": _dropout(F.feature_alpha_dropout),
    "softmax": _softmax(F.softmax),
    "log_softmax": _softmax(F.log_softmax),
    "cross_entropy_loss": _loss(F.cross_entropy, "weight", "ignore_index", "label_smoothing"),
    "nll_loss_nd": _loss(F.nll_loss, "weight", "ignore_index"),
    "mse_loss": _loss(F.mse_loss),
    "l1_loss": _loss(F.l1_loss),
    "smooth_l1_loss": _loss(F.smooth_l1_loss, "beta"),
    "huber_loss": _loss(F.huber_loss, "delta"),
    "binary_cross_entropy": _loss(F.binary_cross_entropy, "weight"),
    "binary_cross_entropy_with_logits": _loss(
        F.binary_cross_entropy_with_logits, "weight", "pos_weight"
    ),
    "kl_div": _loss(F.kl_div, "log_target"),
    "hinge_embedding_loss": _loss(F.hinge_embedding_loss, "margin"),
    "cosine_embedding_loss": _loss(F.cosine_embedding_loss, "margin", of=_PAIR),
    "margin_ranking_loss": _loss(F.margin_ranking_loss, "margin", of=_PAIR),
    "triplet_margin_loss": _loss(
        F.triplet_margin_loss, "margin", "p", "eps", "swap", of=("anchor", "positive", "negative")
    ),
    "ctc_loss": _loss(
        F.ctc_loss,
        *("blank", "zero_infinity"),
        of=("log_probs", "targets", "input_lengths", "target_lengths"),
    ),
    "max_pool1d": _pool(F.max_pool1d),
    "max_pool2d": _pool(F.max_pool2d),
    "max_pool3d": _pool(F.max_pool3d),
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
    "constant_pad_nd": written_as(F.pad, "self", given=("pad", "value")),
    "im2col": _same_order(F.unfold),
    "col2im": _same_order(F.fold),
    **{name: _same_order(function) for name, function in _ACTIVATIONS.items()},
    **{f"{name}_": _same_order(function, inplace=True) for name, function in _ACTIVATIONS.items()},
}
"""A rule for each operator by name."""
