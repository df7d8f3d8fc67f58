"""Convolutions, pooling and images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case
from adversary.inputs import classes
from torch import Tensor, nn


class Residual(nn.Module):
    """A small ResNet without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv in self.convs:
            x = x + conv(F.relu(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Columns(nn.Module):
    """A convolution as a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(27, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, padding=1).transpose(1, 2)
        x = F.fold(self.mix(columns).transpose(1, 2), (6, 6), 1)
        return self.out(F.relu(x)).mean((2, 3))


class Grouped(nn.Module):
    """Depthwise, dilated, transposed, one-dimensional and three-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, padding=2, dilation=2)
        self.pointwise = nn.Conv2d(4, 6, 1)
        self.up = nn.ConvTranspose2d(6, 2, 2, stride=2)
        self.line = nn.Conv1d(2, 2, 3, padding="same", padding_mode="circular")
        self.cube = nn.Conv3d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.silu(self.pointwise(self.depthwise(x))))
        x = self.line(x.flatten(2)).view_as(x)
        return self.cube(x.unsqueeze(1)).squeeze(1).mean((2, 3))


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, where = self.pool(self.conv(x))
        x = self.unpool(x, where)
        return self.head(
            F.avg_pool2d(F.interpolate(x, scale_factor=1.5, mode="bilinear"), 3).flatten(1)
        )


class Shuffled(nn.Module):
    """Splits, shuffles and joins channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, 1)
        x = torch.cat([left, self.last(right)], 1)
        x = F.channel_shuffle(x, 2)
        return self.head(F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)).amax((2, 3))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x).relu()
        second = self.down2(F.max_pool2d(first, 2)).relu()
        return self.out(torch.cat([self.up(second), first], 1))


class Patches(nn.Module):
    """A vision Transformer's embedding with a class token that every sample shares."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 3, stride=3)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.body(x)[:, 0])


def images(samples: int, channels: int = 3) -> Tensor:
    return torch.randn(samples, channels, 6, 6)


def simple(name: str, model: type[nn.Module], channels: int = 3, **options: object) -> Case:
    return Case(name, model, lambda n: images(n, channels), F.cross_entropy, classes, **options)


CASES = (
    simple("residual", Residual, quick=True),
    simple("residual_inference", Residual, options="--mode infer"),
    Case(
        "kinds",
        Grouped,
        lambda n: images(n, 4),
        F.cross_entropy,
        lambda n: torch.randint(2, (n,)),
        manners=FP32_ONLY,
    ),
    simple("columns", Columns, manners=FP32_ONLY),
    simple("pooling", Pooling, manners=FP32_ONLY),
    simple("shuffled", Shuffled, 4),
    Case(
        "unet",
        Unet,
        images,
        F.cross_entropy,
        lambda n: torch.randint(3, (n, 6, 6)),
        options="--stages 3",
        manners=FP32_ONLY,
    ),
    simple("patches", Patches, manners=FP32_ONLY),
)
