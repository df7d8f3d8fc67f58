"""What torch does otherwise where no dispatch mode looks on and tensors are no fakes.

Some composite ops and formulas of gradients write in place, but not to what a mode might look at
(`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and ATen/native): what is watched
takes more memory than what is not. And some kernels make results that look into larger storages
than those of fake tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import FunctionCall, Graph, ModuleCall, Op

_aten = torch.ops.aten

_ADDS: frozenset[object] = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        _aten.linear.default,
        _aten.scaled_dot_product_attention.default,
        nn.Linear,
        nn.MultiheadAttention,
    }
)
"""Ops that add a bias or mask in place to a product that they have just made."""

_UNDER_MODE: frozenset[object] = frozenset({F.multi_head_attention_forward, nn.MultiheadAttention})
"""Those of them around which a stage that draws has a dispatch mode (`runtime.core.random`)."""

_INTO_ZEROS: Mapping[object, Any] = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
}

_TERMS: Mapping[object, Any] = {
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
}

_FORMULAS: Mapping[str, Mapping[object, Any]] = {
    **dict.fromkeys(
        (
            *("MaxBackward0", "MinBackward0", "SortBackward0", "SortBackward1", "TopkBackward0"),
            *("KthvalueBackward0", "MedianBackward1", "NanmedianBackward1", "ModeBackward0"),
            *("CummaxBackward0", "CumminBackward0", "GatherBackward0", "IndexBackward0"),
        ),
        _INTO_ZEROS,
    ),
    "BinaryCrossEntropyWithLogitsBackward0": _TERMS,
}
"""By the node of a backward: the ops that its formula runs in place on what it has made itself."""

_REDUCED: Mapping[object, int] = {_aten.mse_loss.default: 2, _aten.smooth_l1_loss.default: 2}
"""Losses whose single result lies in the storage of all terms, and where their reduction stands."""

REPLAYED = frozenset(
    {
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
        *("TBackward0", "TransposeBackward0", "PermuteBackward0", "UnsqueezeBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "DetachBackward0"),
    }
)
"""Nodes of views that pass a gradient on as it is. Where a view has been written to, autograd makes
its node anew: a real tensor's is AsStridedBackward0, which copies the gradient."""


def adds_in_place(graph: Graph, op: Op, *, draws: bool) -> bool:
    """Whether the sums that an op makes of its own products are made in place.

    Args:
        draws: whether its stage draws random numbers.
    """
    known = _ADDS - _UNDER_MODE if draws else _ADDS
    match op.call:
        case FunctionCall(function=function):
            return function in known
        case ModuleCall(module=module):
            return graph.modules[module].cls in known
        case _:
            return False


def formula_in_place(node: str, func: object) -> Callable[..., Any] | None:
    """What the formula of a node calls instead of `func`, where the first argument is its own."""
    return _FORMULAS.get(node, {}).get(func)


def storage_bytes(func: object, args: tuple[Any, ...]) -> int | None:
    """Bytes of the storage of an op's result; None where they are those of the fake result."""
    place = _REDUCED.get(func)
    if place is None or (len(args) > place and args[place] == 0):
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's own
    size: int = shape.numel() * args[0].element_size()
    return size


# --- sparse gradients -----------------------------------------------------------------------------


_aten = torch.ops.aten


def of_sparse(node: str, func: object, args: tuple[Any, ...]) -> torch.Tensor | None:
    """What torch makes of sparse gradients unwatched and on real tensors; None for other calls.

    A sum has the rows of both. What is added to a parameter's gradient in place leaves that as it
    is: how it grows from micro-batch to micro-batch is `StageTraces.growth`. The first gradient is
    taken over as it is, which while a dispatch mode looks on is copied. And padding, which would
    leave out rows by the values of tensors, is taken to leave out none.

    Args:
        node: the node of the backward at work.
    """
    first = args[0] if args else None
    if not (isinstance(first, torch.Tensor) and first.is_sparse):
        return None
    if func is _aten.clone.default and node.endswith("AccumulateGrad"):
        return _sparse(first._indices(), first._values(), first)
    second = args[1] if len(args) > 1 else None
    if not (isinstance(second, torch.Tensor) and second.is_sparse):
        return None
    if func is _aten.add_.Tensor:
        return first
    if func is _aten.add.Tensor:
        indices = torch.cat((first._indices(), second._indices()), 1)
        return _sparse(indices, torch.cat((first._values(), second._values())), first)
    return None


def parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors whose memory a gradient is."""
    if gradient.is_sparse:
        return gradient._indices(), gradient._values()
    return (gradient,)


def _sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
    )
    return made
