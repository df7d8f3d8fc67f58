"""A multi-layer perceptron that reads scikit-learn's handwritten digits (8x8 pixels, 10 classes).

gpipe-compile examples/mlp_digits.py --stages 4
python mlp_digits_x4/run.py train --epochs 20
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

PIXELS = 64
CLASSES = 10
HIDDEN = 128
LAYERS = 4
BATCH = 64
TEST_IMAGES = 360
EPOCHS = 20
SEED = 0


class DigitReader(nn.Module):
    """Pixels (batch, 64), each from 0 to 1, to class scores (batch, 10).

    The kinks of a ReLU would magnify roundings a million times in 440 steps of training; with tanh
    two runs that add up in different orders end at the same weights, to six digits.
    """

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [PIXELS] + [hidden] * layers
        self.hidden = nn.ModuleList(
            nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(widths)
        )
        self.scores = nn.Linear(hidden, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.scores(x)


def build_model(hidden: int = HIDDEN, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(SEED)
    return DigitReader(hidden, layers)


def example_inputs() -> Tensor:
    return training_set()[0][:BATCH]


def example_target() -> Tensor:
    return training_set()[1][:BATCH]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """One pass over the training set, in an order drawn anew; the last batch is smaller."""
    pixels, digits = training_set()
    for rows in torch.randperm(len(digits)).split(BATCH):
        yield pixels[rows], digits[rows]


def eval_data() -> Iterator[tuple[Tensor, Tensor]]:
    yield test_set()


def metrics(output: Tensor, target: Tensor) -> dict[str, float]:
    return {"accuracy": float((output.argmax(dim=1) == target).float().mean())}


def training_set() -> tuple[Tensor, Tensor]:
    """All images but those of the test set."""
    pixels, digits = _digits()
    return pixels[TEST_IMAGES:], digits[TEST_IMAGES:]


def test_set() -> tuple[Tensor, Tensor]:
    """`TEST_IMAGES` images that training never sees."""
    pixels, digits = _digits()
    return pixels[:TEST_IMAGES], digits[:TEST_IMAGES]


def _digits() -> tuple[Tensor, Tensor]:
    """All 1797 images, from 0 to 1, in an order that mixes the writers."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(SEED))
    pixels = torch.tensor(data.data, dtype=torch.float32) / 16
    return pixels[order], torch.tensor(data.target)[order]
