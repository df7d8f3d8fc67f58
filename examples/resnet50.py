"""ResNet-50 (He et al., arXiv 1512.03385): 25,557,032 parameters.

    gpipe-compile examples/resnet50.py --stages 4
    python resnet50_x4/run.py train

The stride of a bottleneck stands in its 3x3 convolution, as in most programs since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 1000
WIDTH = 64
BLOCKS = (3, 4, 6, 3)
IMAGE = 224
BATCH = 16
SEED = 0


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times `width`, added to what came in."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != wide:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to class scores (batch, classes)."""

    def __init__(self, blocks: Sequence[int], classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(width, width, blocks[0], stride=1)
        self.layer2 = _layer(4 * width, 2 * width, blocks[1], stride=2)
        self.layer3 = _layer(8 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = _layer(16 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def _layer(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """`blocks` bottlenecks, the first of which takes the stride."""
    wide = width * Bottleneck.expansion
    rest = (Bottleneck(wide, width, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(channels, width, stride), *rest)


def build_model(
    classes: int = CLASSES, width: int = WIDTH, blocks: Sequence[int] = BLOCKS
) -> nn.Module:
    torch.manual_seed(SEED)
    return ResNet(blocks, classes, width)


def example_inputs(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _labelled_images(batch, image, CLASSES, SEED)[0]


def example_target(batch: int = BATCH, classes: int = CLASSES) -> Tensor:
    return _labelled_images(batch, 1, classes, SEED)[1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.004, momentum=0.9, weight_decay=1e-4)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of made-up images for ever; put a data loader of your own here."""
    seed = SEED
    while True:
        seed += 1
        yield _labelled_images(BATCH, IMAGE, CLASSES, seed)


def _labelled_images(batch: int, image: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise over a tint that tells the class; only the first ten classes occur."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(min(10, classes), (batch,), generator=generator)
    tints = torch.stack([labels % 3 - 1, labels // 3 % 3 - 1, labels // 9 - 1], dim=1)
    noise = torch.randn(batch, 3, image, image, generator=generator)
    return noise + tints[:, :, None, None].float(), labels
