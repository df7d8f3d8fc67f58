"""Lengths that torch rounds from fractions of sizes, against Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.errors import Notice
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.runtime.sizes import shape_at

LENGTHS: dict[str, Callable[[Any], Tensor]] = {
    "float step": lambda n: torch.arange(0, n, 1.0),
    "float start": lambda n: torch.arange(0.0, n),
    "falling": lambda n: torch.arange(n - 1, -n, -1.0),
    "halves": lambda n: torch.arange(0, n, 0.5),
    "thirds": lambda n: torch.arange(0, n, 3.0),
    "rounded up": lambda n: torch.ones(math.ceil(n / 4)),
    "rounded down": lambda n: torch.ones(math.floor((n + 1) / 3)),
    "whole of a quotient": lambda n: torch.ones(int(n / 4)),
    "whole of a whole": lambda n: torch.ones(int(n) // 2),
    "whole of a half": lambda n: torch.ones(int(n * 0.5)),
    "whole of three halves": lambda n: torch.ones(int(1.5 * n)),
    "whole of a float": lambda n: torch.ones(int(float(n) / 3)),
    "whole of less than nothing": lambda n: torch.ones(7 + int((1 - n) / 8)),
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


ROUNDED: dict[str, Callable[[Any], Tensor]] = {
    "a tenth": lambda n: torch.ones(math.ceil(n * 0.1)),
    "a third": lambda n: torch.ones(math.ceil(n * (1 / 3))),
    "hundredths of a hundred": lambda n: torch.ones(math.ceil(n * 0.01 * 100)),
    "a tenth more and less": lambda n: torch.ones(math.floor(n + 0.1 - 0.1)),
    "a tenth of ten halves": lambda n: torch.ones(int(n * 0.1 * 5)),
    "of a quotient": lambda n: torch.ones(math.floor(n / 4 + 0.1 - 0.1)),
    "in two shares": lambda n: torch.ones(math.ceil(n * 0.3 + n * 0.7)),
    "as a range": lambda n: torch.arange(0, n + 0.1 - 0.1, 1.0),
    "exact before": lambda n: torch.ones(math.ceil(n / 4) + math.floor(n / 4 + 0.1 - 0.1)),
}
"""What floats round on the way, where exact numbers would come to another length at some size."""


@pytest.mark.parametrize("name", ROUNDED)
def test_what_floats_round_is_of_the_size_of_the_example(name: str) -> None:
    graph = trace(Positions(ROUNDED[name]), torch.randn(4, 12, 4), training=False)

    assert not graph.sizes


def test_what_python_makes_a_whole_number_of_is_told() -> None:
    model = Positions(lambda n: torch.ones(int(n * 0.7)))

    with pytest.warns(Notice, match=r"x\.1 is taken at the example's size only.*int\(n \* 0\.7\)"):
        graph = trace(model, torch.randn(4, 12, 4), training=False)
    assert not graph.sizes
