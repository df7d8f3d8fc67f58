"""Loops of several calls, written as the user has them, with the model's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from feed_layers import DIM, Feed
from stage_text import module_of, text_of, trains_as
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.plan import Plan


class SideBySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for feed, norm in zip(self.feeds, self.norms, strict=True):
            h = feed(x)
            h = norm(h)
            x = x + F.relu(h)
        return x + h


class Members(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(DIM), "feed": Feed()}) for _ in range(3)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(DIM)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            residual = x
            x = block["norm"](x)
            x = block["feed"](x) * 2
            x = x + residual
        for scale in self.scales:
            x = x * scale
        return x


class Backwards(nn.Module):
    """The last one first, as the way up of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for feed in reversed(self.feeds):
            x = feed(x) + x
        return x


class TwoCarried(nn.Module):
    """What the second round is given in one place, the third is given in another."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        before = x
        for feed in self.feeds:
            x, before = feed(x) + before, x
            total = total + x * before
        return total


class Sums(nn.Module):
    """Both values are given on, each changed."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        start = x
        total = x * 2
        for feed in self.feeds:
            y = feed(x) + start
            total = total * 0.5 + y
            x = y.tanh() + total
        return total + x + y


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(Feed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        for t in range(1, DIM):
            h = torch.tanh(self.cell(h + x[:, t]))
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            out = out + h[:, i : i + 1] * expert(h)
        return out


class Unlike(nn.Module):
    """Rounds of which the last two are not like the others."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for index, feed in enumerate(self.feeds):
            y = feed(x)
            x = y - x if index == 3 else x - y if index == 4 else y + x
            total = total + y
        return total + x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(
            nn.ModuleList([Feed(), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))])
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for feed, inner in self.outer:
            x = feed(x) + x
            for linear in inner:
                x = F.relu(linear(x)) + x
        return x


class Shared(nn.Module):
    """One layer, called over and over, and once more elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.feed, self.norm = Feed(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.feed(x)
        y = self.norm(x)
        return y + self.feed(y)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class Gathers(nn.Module):
    """What every round makes is read together after the last, normed as in many detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds, self.norm = nn.ModuleList(Feed() for _ in range(4)), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for feed in self.feeds:
            x = feed(x)
            steps.append(self.norm(x))
        return torch.stack(steps).mean(0) + x


class Passes(nn.Module):
    """What is read together is what rounds are given; the last makes something else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        steps = [x]
        for feed in self.feeds[:-1]:
            x = feed(x)
            steps.append(x)
        x = self.feeds[-1](x) * 2
        return torch.cat([*steps, x], dim=1)


class ReadsTwice(nn.Module):
    """The list is read together with one of its items by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for feed in self.feeds:
            x = feed(x)
            steps.append(x)
        return torch.cat([*steps, steps[-2]], dim=1)


class Rounds(nn.Module):
    """What a round of a loop reads as a list, the round after it is given one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for _ in range(3):
            inner = []
            for feed in self.feeds:
                x = feed(x)
                inner.append(x * 0.5)
            steps.append(torch.stack(inner).mean(0))
        return torch.stack(steps).sum(0)


class GathersTwo(nn.Module):
    """Two of a round, one of them of each round of a loop inside."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds, self.sides = (nn.ModuleList(Feed() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, other = [], []
        for feed, side in zip(self.feeds, self.sides, strict=True):
            x = feed(x) + x
            one.append(x)
            other.append(side(x).cos())
        return torch.stack(one).sum(0) - torch.cat(other, dim=1).sum(1, keepdim=True)


class Returns(nn.Module):
    """A model that returns what all its layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds, self.norm = nn.ModuleList(Feed() for _ in range(6)), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        steps: tuple[Tensor, ...] = ()
        for feed in self.feeds:
            x = feed(x)
            steps = (*steps, x)
        return (self.norm(x), *steps)


class Unrolls(nn.Module):
    """One layer, whose last call is unlike the others: nobody reads what it would go on with."""

    def __init__(self) -> None:
        super().__init__()
        self.step = _Step(nn.GRUCell(1, DIM), nn.Linear(DIM, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        said = []
        for t in range(DIM):
            word, h = self.step(x[:, t : t + 1], h)
            said.append(word)
        return torch.cat(said, dim=1)


class _Step(nn.Module):
    def __init__(self, cell: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, out

    def forward(self, word: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(word, h)
        return self.out(h), h.tanh()


class Experts(nn.Module):
    """Every round writes in place, and gives the next one nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(Feed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            found[rows] += weights[rows, place, None] * expert(x[rows])
        return found


class Mapped(nn.Module):
    """The parts of one thing, named where all are taken on."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = map(lambda t: t.unflatten(-1, (2, -1)).cos(), qkv)  # noqa: C417  # as people do
        return (q * k - v).flatten(1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "heads": (Heads, (4, DIM), "[self.heads[str(i)](x) for i in range(4)]"),
    "gathers": (Gathers, (4, DIM), "            steps.append(self.norm(x))\n"),
    "passes": (Passes, (4, DIM), "            steps.append(x_2)\n"),
    "unrolls": (Unrolls, (4, DIM), "        for index in range(5):\n"),
    "reads twice": (ReadsTwice, (4, DIM), ""),
    "rounds": (Rounds, (4, DIM), ""),
    "gathers two": (GathersTwo, (4, DIM), "            other.append(torch.cos(side(x)))\n"),
    "experts": (Experts, (4, DIM), "            rows, place = torch.where(chosen == i)\n"),
    "mapped": (Mapped, (4, DIM), "q, k, v = self.to_qkv(x).chunk(3, dim=-1)"),
    "shared": (Shared, (4, DIM), "        for _ in range(5):\n            x = self.feed(x)"),
    "side by side": (SideBySide, (4, DIM), "for feed, norm in zip(self.feeds.values(), self"),
    "backwards": (Backwards, (4, DIM), "in reversed(range(4)):\n"),
    "members": (Members, (4, DIM), "for block in self.blocks.values():"),
    "two carried": (TwoCarried, (4, DIM), ""),
    "sums": (Sums, (4, DIM), "for feed in self.feeds.values():"),
    "steps": (Steps, (4, DIM, DIM), "h[:, i : i + 1] * self.experts[str(i)](h)"),
    "unlike": (Unlike, (4, DIM), "for index in range(3):"),
    "nested": (Nested, (4, DIM), 'for layer in outer["1"].values():'),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_is_written_as_one(case: str, planned: Callable[..., Plan]) -> None:
    make, shape, line = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.rand(shape)
    text = text_of(planned(copy.deepcopy(model), x, count=1))
    assert line in text, text

    trains_as(module_of(text), model, x)


def test_what_all_rounds_make_is_returned_together(planned: Callable[..., Plan]) -> None:
    """A stage of many layers is no longer than one of a few; its results are those of the model."""
    torch.manual_seed(0)
    model, x = Returns(), torch.rand(4, DIM)
    text = text_of(planned(copy.deepcopy(model), x, count=1))
    assert "        return *all_x, norm_out\n" in text, text
    own = module_of(text)
    own.load_state_dict(model.state_dict())

    (normed, *steps), found = model(x), own(x)

    expected = [*steps, normed]  # a stage returns what it makes in the order in which it does
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_shared_layer_is_written_once_where_a_cut_goes_through_a_call(
    planned: Callable[..., Plan],
) -> None:
    """The call that is cut is written out beside the others."""
    plan = planned(Shared(), torch.rand(4, DIM), count=2)
    assert plan.graph is not None

    sources = write_stages(plan, CodeFacts.of(plan.graph))

    texts = [source.text for source in sources.stages]
    assert "".join((*texts, sources.layers)).count("class Feed") == 1
    assert any("self.feed.up(" in text for text in texts)
    assert all("self.feed(" in text for text in texts)


class Noisy(nn.Module):
    """Adds what it is given, and in every round what it makes itself under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, noise: Tensor, x: Tensor) -> Tensor:
        x = noise + x
        for layer in self.layers:
            noise = torch.ones(DIM)
            x = layer(x * noise + noise)
        return x


def test_rounds_read_the_device_off_what_every_round_has(planned: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    model, given = Noisy(), (torch.rand(4, DIM), torch.rand(4, DIM))
    text = text_of(planned(copy.deepcopy(model), *given, count=1))
    assert "for layer in self.layers.values():" in text, text
    stage = module_of(text)
    stage.load_state_dict(model.state_dict())

    assert "noise = torch.ones(" in text, text
    torch.testing.assert_close(stage(*given), model(*given), rtol=0, atol=0)
