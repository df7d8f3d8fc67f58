"""Sizes that the model itself fixes are told, with the line that fits no other."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.errors import Notice


class Placed(nn.Module):
    """Adds a table of positions to features."""

    def __init__(self, places: int | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.table = None if places is None else nn.Parameter(torch.randn(places, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.table is not None:
            hidden = hidden + self.table
        return self.last(hidden).mean(1)


def test_the_line_is_told_that_fits_one_size() -> None:
    with pytest.warns(Notice) as told:
        graph = trace(Placed(5), torch.randn(4, 5, 6), training=False)

    (note,) = (str(warning.message) for warning in told)
    assert not graph.sizes
    assert "x.1 is taken at the example's size only" in note
    assert "test_fixed_sizes.py" in note
    assert "hidden = hidden + self.table" in note


def test_nothing_is_said_of_features_of_layers_and_of_the_target() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        graph = trace(
            Placed(None), torch.randn(4, 5, 6), target=torch.randn(4, 3), loss_fn=F.mse_loss
        )

    assert [size.name for size in graph.sizes] == ["x.1"]


class Normed(nn.Module):
    """Scales features by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_nothing_is_said_of_features_of_the_users_own_layers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        graph = trace(
            Normed(), torch.randn(4, 5, 6), target=torch.randn(4, 5, 6), loss_fn=F.mse_loss
        )

    assert [size.name for size in graph.sizes] == ["x.1"]
