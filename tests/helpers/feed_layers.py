"""Layers of which the models that are written as loops are made."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

DIM = 6


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 8)
        self.down = nn.Linear(8, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))
