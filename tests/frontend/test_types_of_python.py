"""Types of Python's that a model gives to torch: `dtype=int`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([1, 2, 3, 4, 5, 6], dtype=int)
        wide = self.first(x).to(float) * scale
        return self.last(wide.float()) / float(x.shape[1])


def test_torch_is_given_them_as_they_are() -> None:
    """The graph is that of the model, which `trace` compares it with."""
    x = torch.rand(4, 6)
    graph = trace(Typed(), (x,), target=torch.rand(4, 3), loss_fn=nn.functional.mse_loss)
    dtypes = {value.dtype for value in graph.values.values()}
    assert {torch.int64, torch.float64} <= dtypes
