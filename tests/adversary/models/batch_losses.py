"""Losses of a whole mini-batch, computed once of all outputs: `--loss-over batch`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused, RefusedAtStep
from adversary.inputs import classes, rows
from torch import Tensor, nn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them; the loss is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Two(), Two()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a, b = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        which = torch.arange(len(a), device=a.device)
        loss = (F.cross_entropy(logits, which) + F.cross_entropy(logits.t(), which)) / 2
        return {"loss": loss, "a": a, "b": b}


class Balanced(nn.Module):
    """A mixture whose balancing loss is a product of means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(4, 6, 6) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.gate(x).softmax(-1)
        out = torch.einsum("bi,eij,be->bj", x, self.experts, chances)
        return self.head(out), chances


class Normalised(Two):
    """With BatchNorm before the cut, which is over the mini-batch then too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.norm(self.first(x))).tanh())


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, 3)


def in_batch(output: Tensor, target: Tensor) -> Tensor:
    """Every sample against all others."""
    logits = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).t() * 5
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def mixed_up(output: Tensor, target: Tensor) -> Tensor:
    """The mean of two targets, one of another sample, after the outputs were mixed."""
    mixed = 0.7 * output + 0.3 * output.flip(0)
    return 0.7 * F.cross_entropy(mixed, target) + 0.3 * F.cross_entropy(mixed, target.flip(0))


def balanced(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, chances = output
    used = F.one_hot(chances.argmax(-1), 4).to(chances.dtype).mean(0)
    return F.cross_entropy(logits, target) + 0.1 * 4 * (used * chances.mean(0)).sum()


def root(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target).sqrt()


def decorrelated(output: Tensor, target: Tensor) -> Tensor:
    """Barlow twins: the correlation of features over the batch."""
    z, t = output - output.mean(0), target - target.mean(0)
    c = (z.t() @ t) / len(z)
    return (c - torch.eye(3)).square().sum()


WAYS = ({}, {"microbatches": 3}, {"remat": "full"}, {"precision": "bf16", "microbatches": 1})


def over_batch(name: str, model: object, loss: object, target: object, **more: object) -> Case:
    options = {"options": "--loss-over batch", "manners": WAYS, "sizes": (8, 5), "inputs": rows}
    return Case(name, model, loss=loss, target=target, **{**options, **more})


def numbered(output: Tensor, target: Tensor) -> Tensor:
    """A contrastive loss whose target is the number of each sample."""
    return F.cross_entropy(output @ output.t(), target)  # refused: numbered


CASES = (
    over_batch("in_batch", Two, in_batch, vectors, quick=True),
    over_batch("towers", Towers, None, None, inputs=lambda n: (rows(n), rows(n))),
    over_batch("balanced", Balanced, balanced, classes),
    over_batch("mixed_up", Two, mixed_up, classes),
    over_batch("root", Two, root, vectors),
    over_batch("decorrelated", Two, decorrelated, vectors),
    over_batch("normalised", Normalised, in_batch, vectors, manners=({}, {"microbatches": 3})),
    over_batch("of_samples", Two, F.cross_entropy, classes),
    over_batch(
        "numbered",
        Two,
        numbered,
        torch.arange,
        expect=Refused(
            ("loss_fn raises IndexError on a batch of 2 samples",),
            ("make it in loss_fn, as torch.arange(len(output))",),
        ),
    ),
    over_batch(
        "run_otherwise",
        Two,
        in_batch,
        vectors,
        expect=RefusedAtStep(
            lambda: rows(8),
            ("whole mini-batch", "micro"),
            lambda: vectors(8),
            ("microbatches=1",),
            {"batchnorm": "micro"},
        ),
    ),
    over_batch(
        "in_another_schedule",
        Two,
        in_batch,
        vectors,
        expect=RefusedAtStep(
            lambda: rows(8),
            ("a loss over the whole batch does not go with the schedule 1f1b",),
            lambda: vectors(8),
            ("--schedule gpipe",),
            {"schedule": "1f1b"},
        ),
    ),
)
