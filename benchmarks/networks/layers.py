"""Nets of a given number of ops: of equal layers, or of layers of which no two are equal."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn

OPS_OF_A_LAYER = 4
SAMPLES = 16
EQUAL, LEAST, WIDTHS = 48, 16, 72


class Layers(nn.Module):
    """A product, a factor, a bias and a ReLU for each of these pairs of widths."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        sizes = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(few, more, bias=False) for few, more in sizes)
        self.biases = nn.ParameterList(torch.full((width,), 0.1) for width in widths[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, one after the other."""
        for layer, bias in zip(self.layers, self.biases, strict=True):
            x = torch.relu(layer(x) * 1.5 + bias)
        return x


def net(ops: int, *, repeats: bool) -> Layers:
    """A net of about so many ops, up to 20,000."""
    torch.manual_seed(0)
    count = max(2, ops // OPS_OF_A_LAYER)
    if repeats:
        return Layers([EQUAL] * (count + 1))
    return Layers(list(itertools.islice(_widths(), count + 1)))


def _widths() -> Iterator[int]:
    """Widths of which no two that follow one another do so again."""
    for one in range(LEAST, LEAST + WIDTHS):
        yield one
        for other in range(one + 1, LEAST + WIDTHS):
            yield one
            yield other
