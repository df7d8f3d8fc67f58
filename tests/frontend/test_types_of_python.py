"""Types of Python's that a model gives to torch, or asks about: `dtype=int`, `type(x) is int`."""

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


class Asking(nn.Module):
    """Asks in the ways in which nothing else can stand for a type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        class Odd(int):
            def half(self) -> int:
                return self // 2

        kind = float if x.shape[1] > 100 else int
        if int is int and (2.0).__class__ is not kind:
            x = x.to(x.device, float).float() * 2
        return self.last(self.first(x)) * Odd(7).half()


def test_types_are_those_that_the_model_asks_for() -> None:
    """The graph is that of the model, which `trace` compares it with."""
    x = torch.rand(4, 6)
    trace(Asking(), (x,), target=torch.rand(4, 3), loss_fn=nn.functional.mse_loss)
