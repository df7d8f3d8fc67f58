"""Models with fewer parts than there are to be stages: what holds them together is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import PlanError


class WrittenInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, 0] = x[:, 1] * 2
        return x


def test_what_goes_together_is_said() -> None:
    graph = trace(WrittenInPlace(), torch.randn(8, 4), training=False)

    with pytest.raises(PlanError, match="stages are more than the") as caught:
        plan(graph, stages=3, microbatches=2)

    assert "it writes in place what they touch" in caught.value.problem
    assert caught.value.location is not None
    assert "x[:, 0] = x[:, 1] * 2" in caught.value.location.code
