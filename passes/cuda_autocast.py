"""CUDA's autocast on fake tensors of the host, for what is planned for GPUs where there are none.

Autocast decides op by op, and its rules differ by kind of device: a LayerNorm takes and gives fp32
on CUDA, and 16 bits on the host. Which ops each kind has a rule for, torch's dispatcher tells; what
CUDA's rules are is in torch's own header (ATen/autocast_mode.h) and in its Autocast Op Reference.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.spec import Precision

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_SIXTEEN = (torch.float16, torch.bfloat16)

_IN_TYPE = frozenset(
    {
        *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
        *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
        *("sum", "sum.dim_IntList"),
    }
)
"""Ops that compute in fp32 where they are not asked for another type."""

_WIDEST = frozenset(
    {
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
        *("index_put", "tensordot", "scatter_add"),
    }
)
"""Ops that compute in the widest type of what they are given."""

_LOWER = frozenset(
    {
        *("_convolution", "_convolution.deprecated", "convolution", "conv1d", "conv2d", "conv3d"),
        *("conv1d.padding", "conv2d.padding", "conv3d.padding", "conv_tbc", "conv_transpose1d"),
        *("conv_transpose2d.input", "conv_transpose3d.input", "cudnn_convolution"),
        *("cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum"),
        *("mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul"),
        *("linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell"),
        *("gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention"),
        *("scaled_dot_product_attention", "mkldnn_rnn_layer", "_addmm_activation"),
        *("_native_multi_head_attention", "_cudnn_rnn"),
    }
)
"""Ops that compute in 16 bits, on the host too or by others that do."""

_Library: Callable[..., Any] = torch.library.Library
"""Untyped in torch."""

FORBIDDEN = "binary_cross_entropy"
"""An op that CUDA's autocast refuses."""


@contextlib.contextmanager
def cuda_autocast(precision: Precision) -> Iterator[None]:
    """Makes autocast on the host do what it does on CUDA; nothing in a precision without autocast.

    It is the whole process's while it lasts.
    """
    if lower_dtype(precision) is None:
        yield
        return
    rules = rules_of_cuda()
    with contextlib.ExitStack() as stack:
        library = _Library("aten", "IMPL", "AutocastCPU")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the host's own rules give way
            for name, rule in rules.items():
                library.impl(name, rule)
        yield


def rules_of_cuda() -> Mapping[str, Callable[..., Any]]:
    """What is to be registered for the host, by the names of the ops whose rules differ there."""
    host, cuda = _with_rules("AutocastCPU"), _with_rules("AutocastCUDA")
    found: dict[str, Callable[..., Any]] = {}
    for name in sorted((host | cuda) - _LOWER - {FORBIDDEN}):
        if name not in cuda:
            found[name] = torch.library.fallthrough_kernel
        elif name in _IN_TYPE:
            found[name] = _in_type(_op(name))
        elif name in _WIDEST:
            found[name] = _in_fp32(_op(name), where_mixed=True)
        elif name not in host:
            found[name] = _in_fp32(_op(name))
    return found


def _with_rules(key: str) -> frozenset[str]:
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(
        name.removeprefix("aten::")
        for name in names
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_fp32(op: Any, *, where_mixed: bool = False) -> Callable[..., Any]:
    """Computes in fp32; or only where it is given that beside 16 bits."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_HOST):
            types = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _floats(leaf)}
            if torch.float32 in types or not where_mixed:
                args, kwargs = _cast((args, kwargs), torch.float32)
            return op(*args, **kwargs)

    return rule


def _in_type(op: Any) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_HOST):
            place = [argument.name for argument in op._schema.arguments].index("dtype")
            given = args[place] if place < len(args) else kwargs.get("dtype")
            if given is None and _floats(args[0]) and args[0].dtype in _SIXTEEN:
                args = args[:place]
                kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return rule


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if _floats(tensor) and tensor.dtype in _SIXTEEN else tensor

    return tree_map_only(torch.Tensor, cast, values)


def _floats(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
