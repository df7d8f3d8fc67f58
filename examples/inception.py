"""A small network of Inception blocks (Szegedy et al., arXiv 1409.4842): four branches in each.

gpipe-compile examples/inception.py --stages 2

It returns two outputs in training: the class scores, and those of an auxiliary head half-way,
which leaves the pipeline from an earlier stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
WIDTH = 16
BLOCKS = 4
IMAGE = 32
BATCH = 8
AUXILIARY_WEIGHT = 0.3
SEED = 0


class ConvNorm(nn.Module):
    """Convolution, BatchNorm, ReLU; sides keep their size."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """1x1, 3x3, 5x5 and pooled branches side by side: `4 * width` channels in all."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.point = ConvNorm(channels, width, 1)
        self.narrow3 = ConvNorm(channels, width // 2, 1)
        self.conv3 = ConvNorm(width // 2, width, 3)
        self.narrow5 = ConvNorm(channels, width // 2, 1)
        self.conv5 = ConvNorm(width // 2, width, 5)
        self.pooled = ConvNorm(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = [
            self.point(x),
            self.conv3(self.narrow3(x)),
            self.conv5(self.narrow5(x)),
            self.pooled(F.max_pool2d(x, 3, stride=1, padding=1)),
        ]
        return torch.cat(branches, dim=1)


class InceptionNet(nn.Module):
    """Images (batch, 3, side, side) to scores and auxiliary scores, both (batch, classes)."""

    def __init__(self, classes: int, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 4 * width, 3)
        self.early = nn.Sequential(*(Inception(4 * width, width) for _ in range(blocks // 2)))
        self.late = nn.Sequential(
            *(Inception(4 * width, width) for _ in range(blocks - blocks // 2))
        )
        self.auxiliary = nn.Linear(4 * width, classes)
        self.scores = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = F.max_pool2d(self.stem(images), 2)
        x = self.early(x)
        auxiliary = self.auxiliary(x.mean(dim=(2, 3)))
        x = self.late(F.max_pool2d(x, 2))
        return self.scores(x.mean(dim=(2, 3))), auxiliary


def build_model(classes: int = CLASSES, width: int = WIDTH, blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(SEED)
    return InceptionNet(classes, width, blocks)


def example_inputs(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _stripes(batch, image, SEED)[0]


def example_target(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _stripes(batch, image, SEED)[1]


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    scores, auxiliary = output
    return F.cross_entropy(scores, target) + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of striped images for ever."""
    seed = SEED
    while True:
        seed += 1
        yield _stripes(BATCH, IMAGE, seed)


def _stripes(batch: int, image: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images whose class is the number of their stripes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    phase = torch.rand(batch, 1, generator=generator)
    place = torch.arange(image) / image
    waves = torch.sin(2 * torch.pi * ((labels[:, None] + 1) * place + phase))
    noise = 0.3 * torch.randn(batch, 3, image, image, generator=generator)
    return noise + waves[:, None, None, :], labels
