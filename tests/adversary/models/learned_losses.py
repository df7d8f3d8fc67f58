"""Losses whose terms are weighed by what is learned, or stand in a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused
from adversary.inputs import classes, rows, steps
from adversary.layers import Two
from torch import Tensor, nn

IGNORED = -100


class Adaptive(nn.Module):
    """torch's adaptive softmax, whose clusters get the rows whose target is in them, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.words = nn.AdaptiveLogSoftmaxWithLoss(16, 40, [8, 20])

    def forward(self, x: Tensor, words: Tensor) -> dict[str, Tensor]:
        found = self.words(self.first(x).tanh(), words)  # refused: adaptive
        return {"loss": found.loss, "of_each": found.output}


class AdaptiveInAll(Adaptive):
    """The same of all clusters."""

    def forward(self, x: Tensor, words: Tensor) -> dict[str, Tensor]:
        found = self.words.log_prob(self.first(x).tanh())
        return {"loss": F.nll_loss(found, words)}


class Uncertain(Two):
    """Two tasks, weighed by learned variances (Kendall et al., 2018)."""

    def __init__(self, weigh: Callable[[Uncertain, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh
        self.logs = nn.Parameter(torch.tensor([0.1, -0.3]))
        self.one, self.other = nn.Parameter(torch.tensor(0.2)), nn.Parameter(torch.tensor(-0.4))
        self.depth = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor, depth: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        logits = self.last(hidden)
        classes = F.cross_entropy(logits, labels)
        depths = F.mse_loss(self.depth(hidden).squeeze(-1), depth)
        return {"loss": self.weigh(self, classes, depths), "logits": logits}


def tasks(samples: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(samples, 6),
        "labels": torch.randint(3, (samples,)),
        "depth": torch.randn(samples),
    }


def with_ignored(samples: int) -> dict[str, Tensor]:
    found = tasks(samples)
    found["labels"][1::3] = IGNORED
    return found


def by_scalars(model: Uncertain, one: Tensor, other: Tensor) -> Tensor:
    weighed = torch.exp(-model.one) * one + model.one
    return weighed + torch.exp(-model.other) * other + model.other


def in_a_row(model: Uncertain, one: Tensor, other: Tensor) -> Tensor:
    return (torch.exp(-model.logs) * torch.stack([one, other]) + model.logs).sum()


def in_a_row_mean(model: Uncertain, one: Tensor, other: Tensor) -> Tensor:
    return (torch.stack((one, other)) / (2 * model.logs.exp()) - model.one).mean()


def dotted(model: Uncertain, one: Tensor, other: Tensor) -> Tensor:
    return torch.dot(model.logs.softmax(0), torch.stack([one, other]))


def taken_away(model: Uncertain, one: Tensor, other: Tensor) -> Tensor:
    rows = torch.cat([one.view(1), other.view(1)])
    return model.one - (model.logs - rows * torch.tensor([0.7, 0.3])).sum()


def scaled_together(model: Uncertain, one: Tensor, other: Tensor) -> Tensor:
    return (one + other) * model.one.exp() - model.other


def masked(samples: int) -> tuple[Tensor, Tensor]:
    mask = torch.rand(samples, 4) > 0.4
    mask[0, 0] = True
    return torch.randn(samples, 4, 3), mask


def of_expanded_mask(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Divided by the elements of a mask that was given the output's shape and type."""
    wanted, mask = target
    wide = mask.unsqueeze(-1).expand_as(output).type_as(output)
    return ((output - wanted) ** 2 * wide).sum() / wide.sum()


class Centres(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(3, 3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:  # refused: with_weights
        return F.cross_entropy(output, target) + (output - self.centres[target]).square().mean()


class Scaled(nn.Module):
    """A loss of the output alone, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, output: Tensor) -> Tensor:  # refused: of_output_with_weights
        return (output * self.scale).square().mean()


SEEN = {"steps": 0}


def anneals(output: Tensor, target: Tensor) -> Tensor:  # refused: annealed
    SEEN["steps"] += 1
    return F.cross_entropy(output, target) * min(1.0, SEEN["steps"] / 50)


def with_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(output, target), {"right": (output.argmax(-1) == target).float().mean()}


PENALISED = Two()


def penalised_by_name(output: Tensor, target: Tensor) -> Tensor:
    penalty = PENALISED.last.weight.square().sum()  # refused: penalised_by_name
    return F.cross_entropy(output, target) + 0.01 * penalty


class WithPenalty(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.last.weight.square().sum()


def with_penalty(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], target) + 0.01 * outputs[1]


CASES = (
    *(
        Case(
            how.__name__,
            lambda how=how: Uncertain(how),  # type: ignore[misc]  # bound at once
            tasks,
            later_inputs=with_ignored,
            quick=how is in_a_row,
        )
        for how in (
            by_scalars,
            in_a_row,
            in_a_row_mean,
            dotted,
            taken_away,
            scaled_together,
        )
    ),
    Case("of_expanded_mask", Two, steps, of_expanded_mask, masked),
    Case(
        "with_weights",
        Two,
        rows,
        Centres(),
        classes,
        expect=Refused(("parameters of its own", "centres"), ("part of the model",)),
    ),
    Case(
        "of_output_with_weights",
        Two,
        rows,
        Scaled(),
        expect=Refused(("parameters of its own", "scale"), ("part of the model",)),
    ),
    Case(
        "penalised_by_name",
        lambda: PENALISED,
        rows,
        penalised_by_name,
        classes,
        expect=Refused(("last.weight", "read from outside"), ("have forward return",)),
    ),
    Case("with_penalty", WithPenalty, rows, with_penalty, classes),
    Case(
        "annealed",
        Two,
        rows,
        anneals,
        classes,
        expect=Refused(("SEEN['steps']", "decides what it computes"), ("buffer",)),
    ),
    Case(
        "adaptive",
        Adaptive,
        lambda n: (rows(n), torch.randint(40, (n,))),
        expect=Refused(("clusters alone in which a target is",), ("log_prob(hidden)",)),
    ),
    Case("adaptive_in_all", AdaptiveInAll, lambda n: (rows(n), torch.randint(40, (n,)))),
    Case(
        "with_metrics",
        Two,
        rows,
        with_metrics,  # type: ignore[arg-type]  # what is refused
        classes,
        expect=Refused(("returns a tuple",), ("the loss alone",), at_line=False),
    ),
)
