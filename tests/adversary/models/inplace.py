"""Ops in place, views, and tensors that are filled piece by piece."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused
from adversary.inputs import classes, rows, steps
from torch import Tensor, nn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)


class Plain(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Relus(Two):
    """Activations in place, on what a residual still needs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = x.clone()
        x.add_(0.1)
        x = F.relu(x, inplace=True) * kept
        x += kept
        x.mul_(0.5).add_(1)
        return self.last(x)


class Views(Two):
    """Writes to a part of a tensor through a view."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left = x[:, :4]
        left.mul_(2)
        x[:, -1] = 0
        return self.last(x.tanh())


class Filled(Two):
    """A scan that fills a tensor made before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found = torch.empty_like(x)
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = (self.cell(state) + x[:, step]).tanh()
            found[:, step] = state
        return self.last(found)


class Zeroed(Two):
    """torch.zeros of the batch's own size, written by index."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        found = x.new_zeros(x.shape[0], 8)
        found[:, ::2] = x[:, ::2]
        found[:, 1::2] += x[:, 1::2].tanh()
        return self.last(found)


class WritesInput(Two):
    """Changes what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(-1, 1)
        return self.last(self.first(x).tanh())


class Scatter(Two):
    """Scatters by index, sums by index."""

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        x = self.first(x)
        found = torch.zeros_like(x).scatter_add_(1, where, x)
        found.index_add_(1, torch.tensor([0, 1]), x[:, :2])
        return self.last(found)


class Masked(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.masked_fill_(x < 0, 0.1)
        return self.last(x.index_fill(1, torch.tensor([2]), 1.0))


class Shared(Two):
    """Two names of one tensor, one of them written."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        other = x.view(-1, 2, 4)
        x.add_(1)
        return self.last(other.flatten(1).tanh() + x)


class AfterLoss(Two):
    """What is returned is written after it was used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        out = self.last(hidden.tanh())
        hidden = hidden.detach()
        hidden.zero_()
        return out, hidden


class WritesWhatTheLossReads(Two):
    """What it returns is written with what its own loss is made of too."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        out, logits = 2 * hidden, self.last(hidden)
        out[:, :3] += logits
        return {"loss": F.cross_entropy(logits, target) + out.pow(2).mean(), "out": out}


class AddsUpPenalties(Two):
    """Penalties of layers are added up in place, and returned beside the logits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = torch.zeros(())
        for layer in (self.first, self.last):
            x = layer(x)
            penalty += x.float().abs().mean()
            penalty += x.float().pow(2).sum(1).mean()
        return x, penalty / 2


def with_penalty(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.1 * output[1]


def by_columns(output: Tensor, target: Tensor) -> Tensor:
    """Errors are made of a target and written column by column."""
    hits, errors = F.one_hot(target, 3), torch.zeros_like(output)
    for column in range(3):
        errors[:, column] = (output[:, column] - hits[:, column]).abs()
    return errors.mean()


def clamps_its_output(output: Tensor, target: Tensor) -> Tensor:  # refused: clamped_by_the_loss
    output.clamp_(-0.1, 0.1)
    return F.cross_entropy(output, target)


def first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


def of_steps(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mean(1), target)


def simple(name: str, model: type[nn.Module], inputs: object = rows, **options: object) -> Case:
    return Case(name, model, inputs, F.cross_entropy, classes, **options)


CASES = (
    simple("activations", Relus, quick=True),
    simple("activations_as_written", Relus, options="--no-inplace"),
    simple("views", Views),
    Case("filled", Filled, steps, of_steps, classes),
    simple("zeroed", Zeroed),
    simple("writes_its_input", WritesInput),
    simple("scatter", Scatter, lambda n: (rows(n), torch.randint(8, (n, 8)))),
    simple("masked", Masked),
    simple("shared", Shared),
    Case("returned_with_the_loss", WritesWhatTheLossReads, lambda n: (rows(n), classes(n))),
    Case("penalties", AddsUpPenalties, rows, with_penalty, classes),
    Case("in_the_loss", Plain, rows, by_columns, classes),
    Case(
        "clamped_by_the_loss",
        Plain,
        rows,
        clamps_its_output,
        classes,
        expect=Refused(("writes in place into what the model returns",), ("clone()",)),
    ),
    Case("after_use", AfterLoss, rows, first, classes),
)
