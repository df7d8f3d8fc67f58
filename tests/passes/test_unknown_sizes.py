"""Ops whose number of elements depends on values, on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpipe_compiler.passes.fakes import HostFakes

OPS: dict[str, Callable[[Tensor], object]] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask as an index": lambda x: x[x[:, 0] > 0],
    "mask between slices": lambda x: x[:, torch.ones(4) > 0],
    "mask and a place": lambda x: x[x[:, 0] > 0, 1],
    "assigned by a mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x, return_counts=True),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0),
}


def sizes(item: object) -> list[tuple[int, torch.dtype]]:
    """Numbers of dimensions, and types, of all tensors."""
    if isinstance(item, Tensor):
        return [(item.dim(), item.dtype)]
    assert isinstance(item, tuple)
    return [size for part in item for size in sizes(part)]


@pytest.mark.parametrize("name", OPS)
def test_results_are_like_the_real_ones(name: str) -> None:
    real = OPS[name](torch.randn(6, 4))
    with HostFakes():
        fake = OPS[name](torch.randn(6, 4))

    assert sizes(fake) == sizes(real)


def test_they_neither_double_with_the_batch_nor_stay() -> None:
    with HostFakes():
        counts = [len(torch.randn(n).nonzero()) for n in (1, 2, 4, 8)]

    assert all(other not in (one, 2 * one) for one, other in itertools.pairwise(counts))
    assert all(count >= n for count, n in zip(counts, (1, 2, 4, 8), strict=True))
