"""Splits of tensors into parts that are as long as the values of another tensor say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor

from gpipe_compiler.ir.ops import FunctionCall, Op


def split_by_values(
    tensor: torch.Tensor, sizes: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, ...]:
    """`tensor.split(sizes.tolist(), dim)`; without numbers, in parts that are about as long as each
    other, or where the whole is a symbol, of which nothing has to be relied on then, in one."""
    if not isinstance(sizes, FakeTensor) and not sizes.is_meta:
        return tensor.split_with_sizes(sizes.tolist(), dim)
    whole: Any = tensor.shape[dim]
    if isinstance(whole, torch.SymInt):
        return all_in_one(tensor, sizes, dim)
    return tensor.split_with_sizes(_even_sizes(whole, len(sizes)), dim)


def all_in_one(
    tensor: torch.Tensor, sizes: torch.Tensor, dim: int = 0, *, place: int = -1, others: int = 0
) -> tuple[torch.Tensor, ...]:
    """As `split_by_values` where all elements are in one part, but for so many in each other."""
    parts: list[Any] = [others] * len(sizes)
    parts[place] = tensor.shape[dim] - others * (len(sizes) - 1)
    return tensor.split_with_sizes(parts, dim)


def _even_sizes(whole: int, parts: int) -> Sequence[int]:
    """Sizes of so many parts that differ by one at most."""
    return [(whole + place) // parts for place in range(parts)]


def is_value_split(op: Op) -> bool:
    """Whether an op is such a split."""
    return isinstance(op.call, FunctionCall) and op.call.function is split_by_values
