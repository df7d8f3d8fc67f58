"""Blocks under no_grad and autocast: written around the lines that run in them, and cut apart."""

from __future__ import annotations

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


class Guarded(Feed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            return F.gelu(super().forward(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Feed() for _ in range(4))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for feed in self.feeds:
                x = x + feed(x)
        return self.head(x)


class Inside(nn.Module):
    """Every round has a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(Guarded() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for feed in self.feeds:
                x = feed(x)
        return x.float()


class InBoth(nn.Module):
    """Equal modules in a block and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Feed(), Feed()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x)
        return self.second(x) * y


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "around a loop": (
        Frozen,
        (
            "        with torch.no_grad():\n            for feed in self.feeds.values():\n"
            "                x = x + feed(x)",
        ),
    ),
    "in every round": (
        Inside,
        (
            "        with torch.autocast(x.device.type, enabled=False):\n"
            "            x = x.float()  # (B, 6)\n"
            "            down_out = self.down(F.gelu(self.up(x)))\n"
            "            return F.gelu(down_out)\n",
            "        with torch.autocast(x.device.type, dtype=torch.bfloat16):\n"
            "            for feed in self.feeds.values():\n                x = feed(x)",
        ),
    ),
    "around a module": (
        InBoth,
        ("        with torch.no_grad():\n            y = self.first(x)",),
    ),
}


@pytest.mark.parametrize("label", CASES)
def test_blocks_stand_where_the_user_has_them(label: str, planned: Callable[..., Plan]) -> None:
    made, wanted = CASES[label]
    torch.manual_seed(0)
    model, x = made(), torch.rand(4, DIM)
    text = text_of(planned(model, x, count=1))

    assert all(lines in text for lines in wanted), text
    assert text.count("(nn.Module):") == 2
    trains_as(module_of(text), model, x)


@pytest.mark.parametrize("count", [2, 3])
def test_a_cut_through_a_block_writes_it_in_both_stages(
    count: int, planned: Callable[..., Plan]
) -> None:
    torch.manual_seed(0)
    plan = planned(Frozen(), torch.rand(4, DIM), count=count)
    assert plan.graph is not None
    texts = [stage.text for stage in write_stages(plan, CodeFacts.of(plan.graph)).stages]

    assert all("with torch.no_grad():" in text for text in texts)
    assert all("F.gelu" not in text.split("class Stage")[1] for text in texts)
