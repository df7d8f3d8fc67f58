"""Names of variables say what they hold: a user's name stands for the user's value, or for none."""

from __future__ import annotations

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.plan import Plan

Held = dict[tuple[str, str], list[Tensor]]
"""The tensors that a variable held, by the class whose method bound it and its name."""


def half_turn(x: Tensor) -> Tensor:
    x1 = x[..., :2]
    x2 = x[..., 2:]
    return torch.cat((-x2, x1), dim=-1)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_turned = (q * cos) + (half_turn(q) * sin)
    k_turned = (k * cos) + (half_turn(k) * sin)
    return q_turned, k_turned


class ReturnsMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        down = self.down(up.sigmoid())
        return down.relu()


class ReturnsView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = x.exp() * 3
        return scores.transpose(1, 2).contiguous().transpose(1, 2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(F.silu(self.gate(x)) * self.up(x))
        return down  # noqa: RET504  # the name is what is tested


class Augments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = y + self.two(x).tanh()
        y += self.two(x)
        z = y * 2
        z -= y.mean(-1, keepdim=True)
        y = self.one(self.two(z).relu() + y)
        return F.gelu(y) + z


class Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).split(4, dim=-1)
        cos, sin = x.cos(), x.sin()
        q, k = rotated(q, k, cos, sin)
        weights, places = (q @ k.transpose(1, 2)).softmax(-1).topk(2, dim=-1)
        q, k = k, q
        low, high = (part.tanh() for part in v.chunk(2, dim=-1))
        return torch.cat((low * weights, high + places), dim=-1) + k - q


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float64)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype)


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = x.mean(0) * 0.3
            cos = angles.cos() * 2
            sin = angles.sin() * 3
        return x * cos + sin


class Tables(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            angles = x.mean(0).double()
            cos = angles.cos()
            sin = angles.sin()
        return cos.to(x.dtype), sin.to(x.dtype)


class Rotates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.tables(x)
        return x * cos + half_turn(x) * sin


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        for _ in range(3):
            x = F.relu(self.mix(x)) + skip
        skip = skip + x
        return skip.flatten(1).unflatten(1, (3, 4))


class Whole(nn.Module):
    """One after the other, each in a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for part in MODELS)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x.tanh()


MODELS = (ReturnsMethod, ReturnsView, Gated, Augments, Unpacks, Normed, Frozen, Rotates, Repeats)


@contextmanager
def watched(file: str) -> Iterator[Held]:
    """Notes the tensors of all variables of functions in a file as they run."""
    held: Held = defaultdict(list)

    def note(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != file:
            return None
        owner: FrameType | None = frame
        while owner is not None and not isinstance(owner.f_locals.get("self"), nn.Module):
            owner = owner.f_back
        own = type(owner.f_locals["self"]).__name__ if owner is not None else ""
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor):
                known = held[own, name]
                if not any(same(value, old) for old in known):
                    known.append(value.detach().clone())
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield held
    finally:
        sys.settrace(before)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def misnamed(users: Held, emitted: Held, classes: Mapping[str, str]) -> list[str]:
    """The emitted variables that have a user's name and hold what the user's never held.

    In another type it is the same value.
    """
    found = []
    for (cls, variable), values in emitted.items():
        own, name = classes.get(cls, cls), re.sub(r"_\d+$", "", variable)
        known = users.get((own, variable)) or users.get((own, name))
        right = [any(same(item, old.to(item.dtype)) for old in known or ()) for item in values]
        if known and not all(right):
            found.append(f"{cls}: {variable}")
    return found


@pytest.mark.parametrize("made", [ReturnsMethod, Normed, Whole])
def test_a_users_name_stands_for_the_users_value(
    planned: Callable[..., Plan], made: Callable[[], nn.Module]
) -> None:
    """Both run on a batch that was not traced, all their variables watched."""
    torch.manual_seed(0)
    model, x = made(), torch.rand(2, 3, 4)
    plan = planned(copy.deepcopy(model), torch.rand(2, 3, 4), count=1)
    assert plan.graph is not None
    text = write_stages(plan, CodeFacts.of(plan.graph)).stages[0].text
    namespace: dict[str, Any] = {}
    exec(compile(text, "<stage>", "exec"), namespace)
    stage = namespace["Stage0"]()
    stage.load_state_dict(model.state_dict())

    with watched(__file__) as users:
        expected = model(x)
    with watched("<stage>") as emitted:
        found = stage(x)

    assert torch.equal(found, expected), text
    assert "region" not in text
    assert not misnamed(users, emitted, {"Stage0": type(model).__name__}), text
