"""A loss that micro-batches come to by nearly equal numbers is refused, not taken for rounding.

The weights of the samples differ by a thousandth at most, so that the losses differ by less than
what is allowed for rounding in 32 bits; after some training the weights may differ by much.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import UnsplittableError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.spec import BatchNorm

SAMPLES, WIDTH, CLASSES = 8, 6, 3


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return _weighted(output, target, 1e-3)


def _weighted(output: Tensor, target: Tensor, by: float) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    weight = 1 + by * output.detach().float().sigmoid().mean(1)
    return (each * weight).sum() / weight.sum()


Objective: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class WithLoss(nn.Module):
    """A model that returns its loss: one in training, one in eval mode."""

    def __init__(self, training: Objective, evaluation: Objective, *, normed: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )
        self.objectives = (evaluation, training)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": self.objectives[self.training](logits, labels), "logits": logits}


def compiled(training: Objective, evaluation: Objective, folder: Path, *, normed: bool) -> None:
    torch.manual_seed(0)
    args = (torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,)))
    subject = Subject("model", WithLoss(training, evaluation, normed=normed), args=args)
    options = CompileOptions(stages=2, microbatches=2 if normed else 4, batchnorm=BatchNorm.MICRO)
    compile_subject(subject, options, folder)


def among(output: Tensor, target: Tensor) -> Tensor:
    """Each sample's by its share in the batch: rows, as far as shapes tell."""
    each = F.cross_entropy(output, target, reduction="none")
    return (each * (1 + 3e-5 * output[:, 0].softmax(0))).mean()


CLASS_WEIGHTS = torch.linspace(0.5, 1.5, CLASSES)


def weighted_by_a_closure(output: Tensor, target: Tensor) -> Tensor:
    """What does not run in 64 bits is held in 32, less closely."""
    return _weighted(output, target, 5e-2) + F.cross_entropy(output, target, weight=CLASS_WEIGHTS)


REFUSED = {
    "both modes": (weighted, weighted),
    "eval mode": (F.cross_entropy, weighted),
    "training": (weighted, F.cross_entropy),
    "shares": (among, among),
    "in 32 bits": (weighted_by_a_closure, weighted_by_a_closure),
}

OPEN = ("training", True)
"""BatchNorm takes the samples of each micro-batch together, and so hides what the loss does."""


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("name", "normed"),
    [(name, normed) for name in REFUSED for normed in (False, True) if (name, normed) != OPEN],
)
def test_what_is_nearly_the_loss_is_refused(name: str, normed: bool, tmp_path: Path) -> None:
    with pytest.raises(UnsplittableError, match=r"the loss of the example batch is (\d\.\d{7,})"):
        compiled(*REFUSED[name], tmp_path / "out", normed=normed)


def shares(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, since shares add up to one: nothing in its structure tells so."""
    each = F.cross_entropy(output, target, reduction="none")
    return each.sum() / output.float().softmax(1).sum()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(
    "objectives",
    [(shares, shares), (shares, F.cross_entropy), (F.cross_entropy, shares)],
    ids=["both modes", "training", "eval mode"],
)
def test_what_is_the_loss_but_for_rounding_is_taken(
    objectives: tuple[Objective, Objective], normed: bool, tmp_path: Path
) -> None:
    compiled(*objectives, tmp_path / "out", normed=normed)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    wished = F.one_hot(target, CLASSES).float() * 0.8 + 0.1
    return F.kl_div(output.log_softmax(-1), wished, reduction="batchmean")


def written_into_zeros(output: Tensor, target: Tensor) -> Tensor:
    """Of the type that torch makes when none is named."""
    held = torch.zeros(*output.shape)
    held[:, :] = output
    return divergence(held, target)


class OwnNorm(nn.Module):
    """BatchNorm by its function, which nothing freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor)
        assert isinstance(self.var, Tensor)
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class Weighted(nn.Module):
    """Adds a mean by weights of classes to a loss that nothing tells to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.3, 1.7, CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return F.cross_entropy(output, target, weight=self.weight) + divergence(output, target)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("norm", "loss_fn"),
    [
        (nn.Identity(), divergence),
        (nn.Identity(), written_into_zeros),
        (nn.Identity(), Weighted()),
        (nn.BatchNorm1d(WIDTH), divergence),
        (OwnNorm(), divergence),
    ],
    ids=["plain", "zeros", "weights", "batchnorm", "own batchnorm"],
)
def test_losses_of_the_model_file_are_taken(
    norm: nn.Module, loss_fn: Objective, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    target = torch.randint(0, CLASSES, (SAMPLES,))
    args = (torch.randn(SAMPLES, WIDTH),)
    subject = Subject("model", model, args=args, loss_fn=loss_fn, target=target)
    compile_subject(subject, CompileOptions(stages=2, microbatches=2), tmp_path / "out")
