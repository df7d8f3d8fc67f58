"""What forward keeps outside of buffers and moves on: slowly, once, for long, or for all copies."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor

CALLS = {"seen": 0, "warm": True}


class WarmsUpInAGlobal(Two):
    """A flag that is put out after as many calls as a compile makes before it looks."""

    def forward(self, x: Tensor) -> Tensor:  # refused: warms_up_in_a_global
        CALLS["seen"] += 1
        if CALLS["seen"] > 6:
            CALLS["warm"] = False
        return super().forward(x) * (1.0 if CALLS["warm"] else 0.5)


class SeesSamples(Two):
    """Samples that all models of the class have seen."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:  # refused: sees_samples
        type(self).seen += x.shape[0]
        return super().forward(x) * (1.0 if type(self).seen < 10 else 0.5)


class FirstOfAll(Two):
    """The first step of all models of the class is another one."""

    begins = True

    def forward(self, x: Tensor) -> Tensor:  # refused: first_of_all
        scores = super().forward(x)
        if FirstOfAll.begins and self.training:
            scores = scores * 2
        FirstOfAll.begins = False
        return scores


class CoolsDown(Two):
    """A temperature of the class that has come to its end before anybody looks."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:  # refused: cools_down
        scores = super().forward(x) / self.temperature
        CoolsDown.temperature = max(self.temperature * 0.3, 0.3)
        return scores


class Anneals(Two):
    """A temperature as those of Gumbel's softmax, which two steps move by less than is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:  # refused: anneals
        if self.training:
            self.temperature = max(self.temperature * math.exp(-3e-5), 0.5)
        return super().forward(x) / self.temperature


class AnnealsTensor(Two):
    """The same in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:  # refused: anneals_tensor
        if self.training:
            self.temperature = self.temperature * 0.99997
        return super().forward(x) / self.temperature


class ManyEpochs(Two):
    """A share of an epoch, after whose end another thing is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0.0

    def forward(self, x: Tensor) -> Tensor:  # refused: many_epochs
        self.epochs += 0.001
        return super().forward(x) * (2.0 if self.epochs > 1 else 1.0)


class LongMemory(Two):
    """A list that grows, of which the length counts for little."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:  # refused: long_memory
        self.seen.append(x.shape[1])
        return super().forward(x) * (1 + len(self.seen) / 1e6)


class NotesForNobody(Two):
    """Numbers and lists that decide nothing."""

    seen = 0
    notes: list[int] = []  # noqa: RUF012  # as users write it

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        NotesForNobody.seen += x.shape[0]
        self.notes.append(x.shape[0])
        self.share = 0.9 * self.share + 0.1
        return super().forward(x)


class Collected(Two):
    """What a call has made stays in a list, a dict and an object until the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[Tensor] = []
        self.features: dict[str, Tensor] = {}
        self.last_call = SimpleNamespace(output=None)
        self(torch.zeros(1, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.penalties.clear()
        y = super().forward(x)
        self.penalties.append(y.square().mean(1))
        self.features["last"] = self.last_call.output = y
        return self.last_call.output, self.penalties[-1] + self.features["last"].sum(1)


def of_both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + output[1].mean()


def refused(name: str, model: type[Two], attribute: str, *, quick: bool = False) -> Case:
    expect = Refused((attribute, "forward changes", "another result"), ("a buffer of the model",))
    return Case(name, model, rows, F.cross_entropy, classes, expect=expect, quick=quick)


CASES = (
    refused("warms_up_in_a_global", WarmsUpInAGlobal, "CALLS['seen']"),
    refused("sees_samples", SeesSamples, "SeesSamples.seen", quick=True),
    refused("first_of_all", FirstOfAll, "FirstOfAll.begins"),
    refused("cools_down", CoolsDown, "CoolsDown.temperature"),
    refused("anneals", Anneals, "self.temperature"),
    refused("anneals_tensor", AnnealsTensor, "self.temperature"),
    refused("many_epochs", ManyEpochs, "self.epochs"),
    refused("long_memory", LongMemory, "self.seen"),
    Case("collected", Collected, rows, of_both, classes),
    Case("notes_for_nobody", NotesForNobody, rows, F.cross_entropy, classes),
)
