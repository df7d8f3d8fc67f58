"""Batches of a single sample, of which models compute something else, and squeeze() by which a
batch of one loses its dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused, RefusedAtStep
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn


class OneNumber(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)


class Squeezes(OneNumber):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)).squeeze()  # refused: squeezed_one_by_one


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.head = (
            nn.Conv2d(3, 4, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.conv(x).relu()).squeeze())


class NormsSeveral(Two):
    """A BatchNorm, which in eval mode is next to nothing at first, for more than one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if x.shape[0] > 1:
            hidden = self.norm(hidden)
        return self.last(hidden.tanh())


class SkipsOne(Two):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:  # refused: another_one_by_one
            return self.last(self.first(x))
        return self.last(self.body(x))


class SkipsOneInTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training and len(x) > 1:
            hidden = self.middle(hidden.tanh())
        return self.last(hidden.tanh())


class OneAlike(Two):
    """Another way to the same."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x[0])[None] if len(x) == 1 else self.body(x))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def squeezed_in_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.squeeze(), target)


SEVERAL = (8, 13, 5, 2)
"""Sizes that plain PyTorch takes where a loss does not take a single sample."""


def refuses_one(**arguments: object) -> RefusedAtStep:
    return RefusedAtStep(
        lambda: rows(1),
        ("two samples or more", "alone.py"),
        lambda: classes(1),
        ("pass more samples",),
        arguments,
    )


CASES = (
    Case("squeezed", Squeezes, rows, squared, torch.randn, sizes=(8, 5, 1), quick=True),
    Case("squeezed_at_the_default", Squeezes, rows, squared, torch.randn, microbatches=None),
    Case("squeezed_inference", Squeezes, rows, options="--mode infer", microbatches=None),
    Case(
        "squeezed_one_by_one",
        Squeezes,
        rows,
        options="--mode infer",
        microbatches=8,
        expect=Refused(
            ("no row for it", "squeeze()"),
            ("squeeze(-1)", "at most 4"),
            accept="--microbatches 4",
            reference="whole",
        ),
    ),
    Case("squeezed_in_loss", OneNumber, rows, squeezed_in_loss, torch.rand, sizes=SEVERAL),
    Case(
        "pooled",
        Pooled,
        lambda n: torch.randn(n, 3, 5, 5),
        F.cross_entropy,
        classes,
        sizes=SEVERAL,
        microbatches=None,
    ),
    Case(
        "norms_several",
        NormsSeveral,
        rows,
        options="--mode infer",
        sizes=SEVERAL,
        expect=refuses_one(),
    ),
    Case("another", SkipsOne, rows, F.cross_entropy, classes, sizes=SEVERAL, expect=refuses_one()),
    Case(
        "another_one_by_one",
        SkipsOne,
        rows,
        F.cross_entropy,
        classes,
        sizes=SEVERAL,
        microbatches=8,
        expect=Refused(
            ("something else of a single sample",),
            ("at most 4",),
            accept="--microbatches 4",
            reference="whole",
        ),
    ),
    Case(
        "another_in_training",
        SkipsOneInTraining,
        rows,
        F.cross_entropy,
        classes,
        sizes=SEVERAL,
        expect=refuses_one(),
    ),
    Case("alike", OneAlike, rows, F.cross_entropy, classes),
)
