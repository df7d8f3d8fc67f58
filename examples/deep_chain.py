"""A hundred residual layers, to be trained in the activation memory of nine: three spirals.

    gpipe-compile examples/deep_chain.py --stages 1 --microbatches 1 --remat auto --memory 20MB

A layer keeps a dozen tensors for its backward. A hundred keep eleven times what nine do, as long as
everything that autograd saves stays; recomputed in segments, they need no more than the nine.
`benchmarks/chain_memory.py` measures both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = 100
WIDTH = 32
WIDER = 4
ARMS = 3
BATCH = 1024
STEPS = 100
SEED = 0


class Layer(nn.Module):
    """What a residual adds: (batch, width), widened, bent and narrowed again."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, WIDER * width)
        self.narrow = nn.Linear(WIDER * width, width)
        # The sum of all layers varies as much as a single one would.
        nn.init.normal_(self.narrow.weight, std=1 / math.sqrt(2 * layers * WIDER * width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Chain(nn.Module):
    """Points (batch, 2) to scores (batch, arms), through layers one after another."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.ModuleList(Layer(width, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, ARMS)

    def forward(self, points: Tensor) -> Tensor:
        x = self.enter(points)
        for layer in self.layers:
            x = layer(x)
        return self.scores(self.norm(x))


def build_model(layers: int = LAYERS, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(SEED)
    return Chain(layers, width)


def example_inputs(batch: int = BATCH) -> Tensor:
    return _spirals(batch, SEED)[0]


def example_target(batch: int = BATCH) -> Tensor:
    return _spirals(batch, SEED)[1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """`STEPS` batches of points, each drawn anew."""
    for step in range(1, STEPS + 1):
        yield _spirals(BATCH, SEED + step)


def eval_data() -> Iterator[tuple[Tensor, Tensor]]:
    yield _spirals(BATCH, SEED)


def metrics(output: Tensor, target: Tensor) -> dict[str, float]:
    return {"accuracy": float((output.argmax(dim=1) == target).float().mean())}


def _spirals(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points within the unit circle, and the arm that each lies on."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (batch,), generator=generator)
    radius = torch.rand(batch, generator=generator).sqrt()
    noise = 0.2 * torch.randn(batch, generator=generator)
    angle = 2 * torch.pi * (arm / ARMS + radius) + noise
    return torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), 1), arm
