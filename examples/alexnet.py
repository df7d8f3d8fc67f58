"""AlexNet (Krizhevsky, "One weird trick", arXiv 1404.5997): 61,100,840 parameters.

gpipe-compile examples/alexnet.py --stages 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 1000
WIDTH = 64
IMAGE = 224
BATCH = 8
SEED = 0


class AlexNet(nn.Module):
    """Images (batch, 3, height, width) to class scores (batch, classes)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(width, 3 * width, 5, padding=2)
        self.conv3 = nn.Conv2d(3 * width, 6 * width, 3, padding=1)
        self.conv4 = nn.Conv2d(6 * width, 4 * width, 3, padding=1)
        self.conv5 = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2)
        self.squeeze = nn.AdaptiveAvgPool2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(4 * width * 6 * 6, 64 * width)
        self.fc2 = nn.Linear(64 * width, 64 * width)
        self.fc3 = nn.Linear(64 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv1(images)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.conv3(x))
        x = self.relu(self.conv4(x))
        x = self.pool(self.relu(self.conv5(x)))
        x = torch.flatten(self.squeeze(x), 1)
        x = self.relu(self.fc1(self.dropout(x)))
        x = self.relu(self.fc2(self.dropout(x)))
        return self.fc3(x)


def build_model(classes: int = CLASSES, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(SEED)
    return AlexNet(classes, width)


def example_inputs(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return torch.randn(batch, 3, image, image, generator=torch.Generator().manual_seed(SEED))


def example_target(batch: int = BATCH, classes: int = CLASSES) -> Tensor:
    return torch.arange(batch) % classes


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """The same batch of noise for ever: enough to see that the weights move."""
    while True:
        yield example_inputs(), example_target()
