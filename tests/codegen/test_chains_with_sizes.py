"""Stages of a pyramid in an nn.Sequential, whose layers need sizes that their inputs do not tell.

An nn.Sequential passes one tensor: where sizes are passed along, its modules are called one by one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.frontend.subject import Subject

WIDTH = 8


class Mixer(nn.Module):
    """Tokens in their places among rows and columns, as in PVT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.near = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1, groups=2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        wide = self.up(self.norm(x)).transpose(1, 2).view(x.shape[0], -1, height, width)
        y: Tensor = x + self.down(self.near(wide).flatten(2).transpose(1, 2))
        return y


class Level(nn.Module):
    def __init__(self, *, shrinks: bool) -> None:
        super().__init__()
        self.shrink = nn.Conv2d(WIDTH, WIDTH, 3, 2, 1) if shrinks else None
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.shrink is not None:
            x = self.shrink(x)
        batch, _, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        for mixer in self.mixers:
            tokens = mixer(tokens, (height, width))
        return tokens.reshape(batch, height, width, -1).permute(0, 3, 1, 2).contiguous()


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 7, 4, 3)
        self.levels = nn.Sequential(*(Level(shrinks=place > 0) for place in range(3)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.levels(self.patches(x)).mean((2, 3)))
        return y


@pytest.mark.usefixtures("in_process")
def test_sizes_are_passed_along(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = Subject(
        "pyramid",
        Pyramid(),
        (torch.randn(4, 3, 32, 40),),
        target=torch.randint(0, 3, (4,)),
        loss_fn=nn.functional.cross_entropy,
    )
    made = compile_subject(given, CompileOptions(2, microbatches=2), tmp_path / "out")

    assert made.validation is not None
    assert all(row.passed for row in made.validation.rows)
