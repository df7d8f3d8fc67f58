"""Stages use the words of the user's code: for what loops run over, for sizes, and for numbers."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from stage_text import module_of, text_of, trains_as
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.plan import Plan

DIM = 6


class Residual(nn.Module):
    """Its loops have their own words, and what it is given is called as in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.rest = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name is what is tested
        x = input
        for one, two in zip(self.first, self.second, strict=True):
            x = two(F.relu(one(x)))
        for _, part in enumerate(self.rest):
            x = part(x) + input
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dilated = (nn.Conv1d(DIM, DIM, 3, padding=d, dilation=d + 1) for d in (1, 2, 4))
        self.convs = nn.ModuleList(map(weight_norm, dilated))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x).relu()
        return x


class Kept(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        keep = 1 - self.drop
        mask = keep + self.lin(x).sigmoid()
        return x.div(keep) * mask


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Kept(drop) for drop in (0.5, 0.25, 0.125))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Turned(nn.Module):
    """Asks for sizes when they are in other places than those of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Embedding(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        turned = tokens.t()
        steps, rows = turned.size()
        mask = torch.ones(steps, steps, device=tokens.device).triu(1)
        made: Tensor = (mask @ self.up(turned).reshape(steps, rows * DIM)).reshape(steps, rows, DIM)
        return made


class Grid(nn.Module):
    """Sizes that follow from others stand where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 3, 2, 1)
        self.near = nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        _, _, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        return self.mixed(tokens, height, width)

    def mixed(self, tokens: Tensor, height: int, width: int) -> Tensor:
        wide = tokens.transpose(1, 2).unflatten(2, (height, width))
        made: Tensor = self.near(wide)
        return made


class Scores(nn.Module):
    """Gives back what only some callers read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.up(x)
        weights = scores.softmax(-1)
        out = weights * x
        return out, scores * 2, weights


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scores(), Scores()

    def forward(self, x: Tensor) -> Tensor:
        made, _, shares = self.first(x)
        last, _, _ = self.second(made)
        return last + shares


class Writes(nn.Module):
    """What is written in place stands where the user has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gate(x) + 1, self.up(x) + 2
        x = a.tanh_() * b.sigmoid_()
        decay = (self.up(x) - 1).exp_()
        spread = x * x + 1
        spread.sqrt_()
        return (self.up(x) - decay) / (spread + 2).sqrt_()


class Scaled(nn.Module):
    """Scales as attention does, and makes a layer where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.up(x) @ x.transpose(-1, -2) / math.sqrt(DIM)
        return nn.Softmax(dim=-1)(scores)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[str, ...], tuple[str, ...]]] = {
    "loops": (
        Residual,
        torch.rand(4, DIM),
        (
            "def forward(self, input: Tensor)",
            "for one, two in zip(self.first.values(), self.second.values(), strict=True):\n",
            "for part in self.rest.values():\n",
        ),
        ("input_", "index"),
    ),
    "weight_norm": (
        Normed,
        torch.rand(4, DIM, 12),
        ("self.padding = padding", "self.dilation = dilation"),
        ("_number", "size_"),
    ),
    "numbers": (
        Drops,
        torch.rand(4, DIM),
        ("x / self.keep * mask", "Kept(keep=0.5)"),
        ("_number",),
    ),
    "turned": (Turned, torch.randint(DIM, (4, 5)), (), ("rows = tokens.shape[1]",)),
    "results": (
        Reads,
        torch.rand(4, DIM),
        ("shares, made = self.first(x)", "self.second(made) + shares"),
        (),
    ),
    "scaled": (Scaled, torch.rand(4, 5, DIM), ("6**0.5", "softmax(scores, dim=-1)\n"), ()),
    "in_place": (
        Writes,
        torch.rand(4, DIM),
        (
            "a.tanh_() * b.sigmoid_()",
            "decay = (self.up(x) - 1).exp_()",
            "(spread + 2).sqrt_()",
            "        spread.sqrt_()\n",
        ),
        ("exp = ", "sub = "),
    ),
    "grid": (Grid, torch.rand(4, 3, 8, 10), (), ("floor_div", " add", " sub")),
}


def run(layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)
    return x  # noqa: RET504  # it has a name of its own


class Runs(nn.Module):
    """What its callers call what a function returns is not what that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.third, self.fourth = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        early = run(self.first, x)
        middle = run(self.second, early)
        late = run(self.third, middle)
        late = run(self.fourth, late)
        return early * middle + late


def test_stages_are_given_what_others_return_by_its_name(planned: Callable[..., Plan]) -> None:
    plan = planned(Runs(), torch.rand(4, DIM), count=2)
    first, second = (stage.text for stage in write_stages(plan, CodeFacts.of(plan.graph)).stages)

    returned = re.findall(r"return (.*)", first)[-1].split(", ")
    given = re.findall(r"def forward\(self, (.*)\) ->", second)[-1].split(", ")
    assert {item.partition(":")[0] for item in given} == {"early", "middle", "late"}, second
    assert {*returned} == {"early", "middle", "late"}, first


@pytest.mark.parametrize("case", CASES)
def test_words(case: str, planned: Callable[..., Plan]) -> None:
    make, x, lines, absent = CASES[case]
    torch.manual_seed(0)
    model = make()
    text = text_of(planned(copy.deepcopy(model), x, count=1))
    for line in lines:
        assert line in text, text
    for line in absent:
        assert line not in text, text

    trains_as(module_of(text), model, x)
