"""Lengths that torch rounds from fractions of sizes, against Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.runtime.sizes import shape_at

LENGTHS: dict[str, Callable[[Any], Tensor]] = {
    "float step": lambda n: torch.arange(0, n, 1.0),
    "float start": lambda n: torch.arange(0.0, n),
    "falling": lambda n: torch.arange(n - 1, -n, -1.0),
    "halves": lambda n: torch.arange(0, n, 0.5),
    "of a product": lambda n: torch.arange(n * 1.5),
    "thirds": lambda n: torch.arange(0, n, 3.0),
    "rounded up": lambda n: torch.ones(math.ceil(n / 4)),
    "rounded down": lambda n: torch.ones(math.floor((n + 1) / 3)),
}
"""What a model makes of a number of tokens."""


class Positions(nn.Module):
    def __init__(self, made: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.made = made

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.made(x.shape[1])
        return self.last(self.first(x).relu()), made


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_known_at_every_size(name: str) -> None:
    made = LENGTHS[name]
    graph = trace(Positions(made), torch.randn(4, 12, 4), training=False, free=["x.1"])
    _, length = value_names(graph.outputs)
    known = graph.values[length].dims

    for tokens in range(2, 50):
        assert shape_at(known, {"x.1": tokens}) == made(tokens).shape


@pytest.mark.parametrize("share", [0.1, 1 / 3])
def test_what_floats_do_not_hold_is_not_taken_for_exact(share: float) -> None:
    """The nearest fraction to a tenth is none, and what is rounded up of it may be one more."""
    model = Positions(lambda n: torch.ones(math.ceil(n * share)))

    graph = trace(model, torch.randn(4, 12, 4), training=False)

    assert not graph.sizes
