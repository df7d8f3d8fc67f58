"""What models of several files are made of; plain PyTorch only, as the judge imports it too."""

from __future__ import annotations

from torch import Tensor, nn


class Two(nn.Module):
    """Layers before a cut and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def body(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x).tanh()).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))
