"""Sparse gradients, of which fake tensors do not tell how many rows there are."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def of_sparse(node: str, func: object, args: tuple[Any, ...]) -> torch.Tensor | None:
    """What torch makes of sparse gradients unwatched and on real tensors; None for other calls.

    A sum has the rows of both. What is added to a parameter's gradient in place leaves that as it
    is: how it grows from micro-batch to micro-batch is `StageTapes.growth`. The first gradient is
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
