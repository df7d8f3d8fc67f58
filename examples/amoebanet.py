"""AmoebaNet-D and AmoebaNet-B for images (Real et al., arXiv 1802.01548), the networks of GPipe.

    gpipe-compile examples/amoebanet.py --stages 4

The cells are those of the published genotypes (github.com/tensorflow/tpu, amoebanet/model_specs):
every cell takes the outputs of the two cells before it, makes five sums of two operations each, and
hands on some of them. Of size (layers, filters), the network has `layers` normal cells in three
groups between reductions; those of the first group have `filters` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = 6
FILTERS = 64
CLASSES = 10
IMAGE = 64
BATCH = 16
SEED = 0


def convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    """ReLU, a convolution that keeps the size (but for its stride), BatchNorm."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, sizes, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class FactorizedReduction(nn.Module):
    """Halves the size: every second pixel, and every second pixel beside these."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))


def identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def average_3x3(_: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def max_3x3(_: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, 1)


def max_2x2(_: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return convolution(channels, channels, 1, stride)


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """In a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        convolution(channels, narrow, 1),
        convolution(narrow, narrow, 3, stride),
        convolution(narrow, channels, 1),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """In a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        convolution(channels, narrow, 1),
        convolution(narrow, narrow, (1, 7), (1, stride)),
        convolution(narrow, narrow, (7, 1), (stride, 1)),
        convolution(narrow, channels, 1),
    )


class Separable(nn.Module):
    """Twice: a convolution of every channel by itself, one that mixes channels, BatchNorm."""

    def __init__(self, channels: int, stride: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        padding = dilation * (kernel // 2)

        def once(stride: int) -> list[nn.Module]:
            return [
                nn.ReLU(),
                nn.Conv2d(
                    channels,
                    channels,
                    kernel,
                    stride,
                    padding,
                    dilation,
                    groups=channels,
                    bias=False,
                ),
                nn.Conv2d(channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            ]

        self.layers = nn.Sequential(*once(stride), *once(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


separable_3x3 = partial(Separable, kernel=3)
dilated_5x5 = partial(Separable, kernel=5, dilation=2)

Operation = Callable[[int, int], nn.Module]
Pairs = Sequence[tuple[tuple[Operation, int], tuple[Operation, int]]]


@dataclass(frozen=True)
class Genotype:
    """The sums of a cell: (operation, the state it takes) twice for each; and what is handed on."""

    pairs: Pairs
    concat: tuple[int, ...]


D_NORMAL = Genotype(
    (
        ((conv_1x1, 1), (max_3x3, 1)),
        ((identity, 1), (conv_1x7_7x1, 0)),
        ((conv_1x1, 0), (conv_1x7_7x1, 0)),
        ((max_3x3, 2), (identity, 2)),
        ((average_3x3, 1), (conv_1x1, 5)),
    ),
    (0, 3, 4, 6),
)
D_REDUCTION = Genotype(
    (
        ((max_2x2, 0), (max_3x3, 0)),
        ((identity, 2), (conv_3x3, 1)),
        ((conv_1x7_7x1, 2), (max_3x3, 2)),
        ((identity, 3), (max_2x2, 1)),
        ((average_3x3, 2), (conv_1x1, 3)),
    ),
    (4, 5, 6),
)
B_NORMAL = Genotype(
    (
        ((conv_1x1, 1), (max_3x3, 1)),
        ((identity, 1), (separable_3x3, 0)),
        ((conv_1x1, 0), (separable_3x3, 0)),
        ((conv_1x1, 2), (identity, 2)),
        ((average_3x3, 1), (conv_1x1, 5)),
    ),
    (0, 3, 4, 6),
)
B_REDUCTION = Genotype(
    (
        ((max_2x2, 0), (max_3x3, 0)),
        ((identity, 2), (conv_3x3, 1)),
        ((dilated_5x5, 2), (max_3x3, 2)),
        ((identity, 3), (separable_3x3, 1)),
        ((average_3x3, 4), (conv_1x1, 3)),
    ),
    (5, 6),
)


class Cell(nn.Module):
    """Takes the outputs of the last two cells, and gives its own with the later of them."""

    def __init__(
        self,
        older: int | None,
        newer: int,
        channels: int,
        genotype: Genotype,
        *,
        halve: bool,
        lag: bool,
    ) -> None:
        """`lag`: the cell before has halved the size, so that the older output is still larger.

        Without an older output, the newer one is used in its place.
        """
        super().__init__()
        self.sources = tuple(source for pair in genotype.pairs for _, source in pair)
        self.concat = genotype.concat
        self.outputs = channels * len(genotype.concat)
        self.newer = convolution(newer, channels, 1)
        self.older: nn.Module | None = None
        if older is not None:
            self.older = nn.Identity() if older == channels else convolution(older, channels, 1)
            if lag:
                self.older = FactorizedReduction(older, channels)
        self.operations = nn.ModuleList(
            operation(channels, 2 if halve and source < 2 else 1)
            for pair in genotype.pairs
            for operation, source in pair
        )

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        last, before = both
        newer = self.newer(last)
        states = [newer if self.older is None else self.older(before), newer]
        for index in range(0, len(self.operations), 2):
            one, other = self.operations[index], self.operations[index + 1]
            sources = self.sources[index], self.sources[index + 1]
            states.append(one(states[sources[0]]) + other(states[sources[1]]))
        return torch.cat([states[index] for index in self.concat], 1), last


class Stem(nn.Module):
    """The first convolution; what it gives counts as the last two outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.conv(x))
        return x, x


class Classifier(nn.Module):
    """The mean over all pixels, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(both[0].mean((2, 3)))


class AmoebaNet(nn.Sequential):
    """A sequence of `layers` + 6: stem, two reductions, three groups of cells, classifier."""

    def __init__(
        self,
        layers: int,
        filters: int,
        normal: Genotype,
        reduction: Genotype,
        *,
        stem: tuple[int, int, int],
        twice: bool,
        classes: int,
    ) -> None:
        """`stem`: channels of the first convolution, and of the two reductions after it, the first
        of which takes the stem's output as both of its own, or (`twice` is False) as the newer."""
        super().__init__(Stem(stem[0]))
        older, newer = stem[0] if twice else None, stem[0]
        lag = False

        def grow(channels: int, genotype: Genotype, *, halve: bool) -> None:
            nonlocal older, newer, lag
            cell = Cell(older, newer, channels, genotype, halve=halve, lag=lag)
            self.append(cell)
            older, newer, lag = newer, cell.outputs, halve

        grow(stem[1], reduction, halve=True)
        grow(stem[2], reduction, halve=True)
        for group in range(3):
            if group:
                grow(filters << group, reduction, halve=True)
            for _ in range(layers // 3):
                grow(filters << group, normal, halve=False)
        self.append(Classifier(newer, classes))


def amoebanet_d(layers: int, filters: int, classes: int = 1000) -> AmoebaNet:
    stem = filters // 4, filters // 2, filters
    return AmoebaNet(layers, filters, D_NORMAL, D_REDUCTION, stem=stem, twice=True, classes=classes)


def amoebanet_b(layers: int, filters: int, classes: int = 1000) -> AmoebaNet:
    """With the stem of the TensorFlow code."""
    stem = 32, filters // 4, filters // 2
    return AmoebaNet(
        layers, filters, B_NORMAL, B_REDUCTION, stem=stem, twice=False, classes=classes
    )


def build_model(layers: int = LAYERS, filters: int = FILTERS, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(SEED)
    return amoebanet_d(layers, filters, classes)


def example_inputs(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _gratings(batch, image, SEED)[0]


def example_target(batch: int = BATCH, image: int = IMAGE) -> Tensor:
    return _gratings(batch, image, SEED)[1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of gratings for ever."""
    seed = SEED
    while True:
        seed += 1
        yield _gratings(BATCH, IMAGE, seed)


def _gratings(batch: int, image: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of waves whose class is the direction in which they run."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    angles = torch.pi * labels / CLASSES
    place = torch.arange(image) * (6 * torch.pi / image)
    rows = torch.sin(angles)[:, None, None] * place[:, None]
    columns = torch.cos(angles)[:, None, None] * place
    noise = 0.3 * torch.randn(batch, 3, image, image, generator=generator)
    return noise + torch.sin(rows + columns)[:, None], labels
