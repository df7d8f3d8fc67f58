"""Models with fewer parts than there are to be stages: what holds them together is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import PlanError


class UnderOneWith(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(self.first(x).relu())


class WrittenInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, 0] = x[:, 1] * 2
        return x


@pytest.mark.parametrize(
    ("model", "why", "line"),
    [
        (UnderOneWith(), "the 3 ops in one `with` are never cut apart", "self.last(self.first"),
        (WrittenInPlace(), "it writes in place what they touch", "x[:, 0] = x[:, 1] * 2"),
    ],
)
def test_what_goes_together_is_said(model: nn.Module, why: str, line: str) -> None:
    graph = trace(model, torch.randn(8, 4), training=False)

    with pytest.raises(PlanError, match="stages are more than the") as caught:
        plan(graph, stages=3, microbatches=2)

    assert why in caught.value.problem
    assert caught.value.location is not None
    assert line in caught.value.location.code
