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
    other."""
    if not isinstance(sizes, FakeTensor) and not sizes.is_meta:
        return tensor.split_with_sizes(sizes.tolist(), dim)
    return tensor.split_with_sizes(even_sizes(tensor.shape[dim], len(sizes)), dim)


FEWEST = 2
"""Elements in each part on average, at least, for parts to be of other sizes."""


def split_unevenly(
    tensor: torch.Tensor, sizes: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, ...]:
    """As `split_by_values` without numbers, each of several parts of another size than there.

    Raises:
        ValueError: where there are too few elements for that.
    """
    even = even_sizes(tensor.shape[dim], len(sizes))
    if sum(even) < FEWEST * len(even):
        raise ValueError(
            "values say how long its parts are, of which there are about as many as "
            "elements, however many samples"
        )
    more = [1 - 2 * (place % 2) for place in range(len(even))]
    if len(even) % 2:
        more[-3:] = (1, 1, -2) if len(even) > 1 else (0,)
    parts = [size + own for size, own in zip(even, more, strict=True)]
    return tensor.split_with_sizes(parts, dim)


def even_sizes(whole: Any, parts: int) -> Sequence[Any]:
    """Sizes of parts that differ by one at most; where the whole is a symbol, all of it in the last
    part, so that nothing about the symbol has to be relied on."""
    if isinstance(whole, torch.SymInt):
        sizes: list[Any] = [0] * parts
        sizes[-1] = whole
        return sizes
    return [(whole + place) // parts for place in range(parts)]


def is_value_split(op: Op) -> bool:
    """Whether an op is such a split."""
    return isinstance(op.call, FunctionCall) and op.call.function is split_by_values
