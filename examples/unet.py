"""A U-Net (Ronneberger et al., arXiv 1505.04597): every level is skipped over by a long edge.

gpipe-compile examples/unet.py --stages 4
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEPTH = 4
WIDTH = 32
CONVOLUTIONS = 2
IMAGE = 96
BATCH = 8
SEED = 0


class ConvBlock(nn.Sequential):
    """`convolutions` times 3x3 convolution, BatchNorm, leaky ReLU."""

    def __init__(self, channels: int, width: int, convolutions: int) -> None:
        layers: list[nn.Module] = []
        for index in range(convolutions):
            fan_in = channels if index == 0 else width
            layers += [
                nn.Conv2d(fan_in, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.LeakyReLU(0.1),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Images (batch, 3, side, side) to one score per pixel (batch, 1, side, side).

    The side is a multiple of `2 ** depth`.
    """

    def __init__(self, depth: int, width: int, convolutions: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList()
        channels = 3
        for wide in widths[:-1]:
            self.down.append(ConvBlock(channels, wide, convolutions))
            channels = wide
        self.pool = nn.MaxPool2d(2)
        self.bottom = ConvBlock(channels, widths[-1], convolutions)
        self.grow = nn.ModuleList()
        self.up = nn.ModuleList()
        for wide in reversed(widths[:-1]):
            self.grow.append(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2))
            self.up.append(ConvBlock(2 * wide, wide, convolutions))
        self.score = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = torch.cat([skips.pop(), grow(x)], dim=1)
            x = block(x)
        return self.score(x)


def build_model(
    depth: int = DEPTH, width: int = WIDTH, convolutions: int = CONVOLUTIONS
) -> nn.Module:
    torch.manual_seed(SEED)
    return UNet(depth, width, convolutions)


def example_inputs(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _discs(batch, image, SEED)[0]


def example_target(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _discs(batch, image, SEED)[1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy images of one disc each, and the pixels that it covers."""
    seed = SEED
    while True:
        seed += 1
        yield _discs(BATCH, IMAGE, seed)


def _discs(batch: int, image: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(2, batch, 1, 1, generator=generator)
    radius = 0.1 + 0.3 * torch.rand(batch, 1, 1, generator=generator)
    axis = (torch.arange(image) + 0.5) / image
    distance = (axis[None, :, None] - centre[0]) ** 2 + (axis[None, None, :] - centre[1]) ** 2
    disc = (distance < radius**2).float()[:, None]
    images = disc + 0.5 * torch.randn(batch, 3, image, image, generator=generator)
    return images, disc
