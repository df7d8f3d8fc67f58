"""The user's functions, which stages call by their names."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.plan import Plan


def swap(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return turned.tanh()


def damp(x: Tensor, factor: float) -> Tensor:
    wide = x * factor
    return (wide.sin() + x).cos()


def table(length: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    return (places[:, None] - places).tanh()


def wave(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.sin()
        x = x + 1
    return x


class Turn(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.mix(x)
        left, right = swap(x), swap(x + residual)
        x = damp(left, self.factor) + damp(right, 2.0)
        x = wave(x, 3) @ table(4, x.device)
        return x + residual


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.ModuleList(Turn(0.5 + index) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for turn in self.turns:
            x = turn(x)
        return x


def test_functions_of_the_user_are_written_once_and_called(
    planned: Callable[..., Plan], tmp_path: Path
) -> None:
    """With the numbers and the device that they are given; the stage is exact, at any batch."""
    torch.manual_seed(0)
    model, x = Turns(), torch.rand(4, 4)
    plan = planned(copy.deepcopy(model), x, count=1)
    assert plan.graph is not None

    (source,) = write_stages(plan, CodeFacts.of(plan.graph)).stages

    for signature in (
        "def swap(x: Tensor) -> Tensor:",
        "def damp(x: Tensor, factor: float) -> Tensor:",
        "def table(device: torch.device) -> Tensor:",
        "def wave(x: Tensor) -> Tensor:",
    ):
        assert source.text.count(signature) == 1, source.text
    assert source.text.count("class Turn(nn.Module)") == 1
    assert "factor=self.factor" in source.text
    assert "residual = x\n" in source.text
    namespace: dict[str, Any] = {}
    exec(source.text, namespace)
    stage = namespace["Stage0"]()
    stage.load_state_dict(model.state_dict())
    for rows in (4, 6):
        given = torch.rand(rows, 4)
        assert torch.equal(stage(given), model(given))
    file = tmp_path / "stage.py"
    file.write_text(source.text)
    for command in (["ruff", "check", "--isolated"], ["mypy", "--strict"]):
        tool = [sys.executable, "-m", *command, str(file)]
        done = subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_what_several_stages_call_is_written_in_one_file(planned: Callable[..., Plan]) -> None:
    plan = planned(Turns(), torch.rand(4, 4), count=2)
    assert plan.graph is not None

    sources = write_stages(plan, CodeFacts.of(plan.graph))

    assert sources.layers.count("def swap(") == 1
    assert not any("def swap(" in stage.text for stage in sources.stages)


class Parts(nn.Module):
    """Writes to parts of a tensor, reads constants that have a name, and keeps first sizes."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shifted = x.new_zeros(batch, length, dim)
        shifted[:, 1:] = x[:, :-1].clone()
        heads = shifted.view(batch, length, 2, dim // 2)
        scaled = (heads * 8**-0.5).clamp(min=torch.finfo(torch.float32).min)
        return scaled.reshape(batch, length, dim)


def test_constants_and_parts_read_as_the_user_wrote_them(planned: Callable[..., Plan]) -> None:
    model, x = Parts(), torch.rand(4, 3, 4)
    plan = planned(model, x, count=1)
    assert plan.graph is not None

    (source,) = write_stages(plan, CodeFacts.of(plan.graph)).stages

    assert "shifted[:, 1:] = x[:, :-1].clone()" in source.text, source.text
    assert "8**-0.5" in source.text
    assert "torch.finfo(torch.float32).min" in source.text
    namespace: dict[str, Any] = {}
    exec(source.text, namespace)
    given = torch.rand(6, 3, 4)
    assert torch.equal(namespace["Stage0"]()(given), model(given))
