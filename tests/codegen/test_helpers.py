"""The user's functions, which stages call by their names."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.codegen.value_names import name_of_module
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


def gate(x: Tensor, y: Tensor) -> Tensor:
    share = torch.sigmoid(x)
    return share * y + (1 - share) * x


class Gates(nn.Module):
    """Stages of which have functions in common, and no class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = gate(self.first(x), x) + gate(x, x.sin())
        y = gate(self.last(x), x)
        return gate(x, y) + gate(y, x.cos())


def test_functions_alone_in_the_common_file_have_their_imports_and_names(
    planned: Callable[..., Plan],
) -> None:
    plan = planned(Gates(), torch.rand(4, 4), count=2)
    assert plan.graph is not None

    layers = write_stages(plan, CodeFacts.of(plan.graph)).layers

    assert "class " not in layers
    assert "def gate(x: Tensor, y: Tensor) -> Tensor:" in layers, layers
    namespace: dict[str, Any] = {}
    exec(layers, namespace)
    x, y = torch.rand(2, 4, 4)
    assert torch.equal(namespace["gate"](x, y), gate(x, y))


def test_what_a_call_makes_is_named_after_the_function() -> None:
    """Not after the op that tells the call from others."""
    assert name_of_module("layers.1.gate()mul_1") == "gate_out"
    assert name_of_module("gate()") == "gate_out"


def scale(x: Tensor, kind: str, keep: bool = True) -> Tensor:
    if kind == "max":
        return x / (x.abs().amax(-1, keepdim=keep) + 1)
    size = x.pow(2).sum(-1, keepdim=keep)
    return x / (size + 1)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return scale(y, "max") + scale(x, "sum")


def test_no_tensor_is_named_after_an_argument_that_is_none(planned: Callable[..., Plan]) -> None:
    plan = planned(Scales(), torch.rand(4, 4), count=1)
    assert plan.graph is not None

    (source,) = write_stages(plan, CodeFacts.of(plan.graph)).stages

    assert "keep: Tensor" not in source.text, source.text
    assert "kind: Tensor" not in source.text


def fold(x: Tensor, heads: int) -> Tensor:
    batch, length, dim = x.shape
    split = x.view(batch, length, heads, dim // heads)
    return split.transpose(1, 2).reshape(batch * heads, length, dim // heads)


class Folds(nn.Module):
    """A stage of which folds one of two factors, the other of which tells the rows by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left = fold(self.first(x), 2)
        right = fold(self.last(x), 2)
        return torch.bmm(left, right.transpose(1, 2))


def test_no_size_is_computed_that_nothing_reads(planned: Callable[..., Plan]) -> None:
    plan = planned(Folds(), torch.rand(4, 3, 4), count=2)
    assert plan.graph is not None

    for stage in write_stages(plan, CodeFacts.of(plan.graph)).stages:
        bare = [node for node in ast.walk(ast.parse(stage.text)) if isinstance(node, ast.Expr)]
        assert not any(isinstance(node.value, ast.BinOp) for node in bare), stage.text


def test_imports_are_as_ruff_sorts_and_breaks_them() -> None:
    names = ("B", "F_2", "Block10", "Block2", "BERTop", "BertLayer", "fold_10", "fold_2", "call")
    for count in range(1, len(names) + 1):
        imports = Imports()
        for name in names[:count]:
            imports.name(".layers", name)
        text = "\n".join([*imports.lines(), ""])
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=I", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


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


def soften(x: Tensor, by: float) -> Tensor:
    return (x.sigmoid() * by + 1.0).sin() - x


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.one(x), self.two(x)
        x = soften(first, 2.0) + soften(second, 3.0)
        return x.tanh()


def test_two_calls_of_a_function_on_one_line_are_two(planned: Callable[..., Plan]) -> None:
    plan = planned(Soft(), torch.rand(4, 4), count=1)
    assert plan.graph is not None
    (stage,) = write_stages(plan, CodeFacts.of(plan.graph)).stages
    assert stage.text.count("def soften(x: Tensor, by: float) -> Tensor:") == 1, stage.text
    assert stage.text.count("soften(") == 3, stage.text


def shifted(x: Tensor, by: float) -> Tensor:
    def move(y: Tensor) -> Tensor:
        moved = y + by
        return moved.sin()

    return move(x) * 2


class Shifts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return shifted(shifted(x, 0.5), 0.5).tanh()


def test_a_function_in_a_function_is_part_of_it(planned: Callable[..., Plan]) -> None:
    plan = planned(Shifts(), torch.rand(2, 4), count=1)
    assert plan.graph is not None
    text = write_stages(plan, CodeFacts.of(plan.graph)).stages[0].text

    assert text.count("def shifted") == 1
    assert "def move" not in text
