"""A net of 2,000 ops in which no two layers are equal; a file for gpipe-compile."""

import itertools

import torch
from torch import nn

LAYERS, SAMPLES = 500, 16
WIDTHS = [16 + layer % 37 + layer // 37 for layer in range(LAYERS + 1)]


class Unequal(nn.Module):
    """Layers of ever other widths: a product, a factor, a bias and a ReLU each."""

    def __init__(self) -> None:
        super().__init__()
        sizes = itertools.pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(few, more, bias=False) for few, more in sizes)
        self.biases = nn.ParameterList(torch.zeros(width) for width in WIDTHS[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, one after the other."""
        for number, (layer, bias) in enumerate(zip(self.layers, self.biases, strict=True)):
            x = torch.relu(layer(x) * (1 + number / LAYERS) + bias)
        return x


def build_model() -> nn.Module:
    """The net."""
    torch.manual_seed(0)
    return Unequal()


def example_inputs() -> torch.Tensor:
    """Numbers."""
    return torch.randn(SAMPLES, WIDTHS[0])


def example_target() -> torch.Tensor:
    """Numbers."""
    return torch.randn(SAMPLES, WIDTHS[-1])


loss_fn = nn.functional.mse_loss
