"""Which modules of a stage torch.compile is given, and what is shared among them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core import compiled_blocks
from gpipe_compiler.runtime.core.compiled_blocks import (
    CompiledBlocks,
    check_compiler,
    refuse_compiled,
)
from gpipe_compiler.runtime.core.random import OverDraws, SeededRandom
from gpipe_compiler.runtime.errors import PipelineError, UsageError
from gpipe_compiler.runtime.spec import ScheduleKind, StageSpec, WeightSharding


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Layer(nn.Module):
    """A layer with a part of a class of its own; it draws where it is told to."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.scale, self.p = Scale(), p
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.fc(self.scale(x)), self.p, self.training)


class Counted(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x * 2


class Stage(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def spec(**known: object) -> StageSpec:
    return StageSpec(Stage, ("x",), ("y",), **known)  # type: ignore[arg-type]


def names(stage: nn.Module, chosen: tuple[nn.Module, ...]) -> list[str]:
    known = {id(module): name for name, module in stage.named_modules()}
    return [known[id(block)] for block in chosen]


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is given to torch.compile, which here gives it back."""
    given: list[object] = []

    def compile_nothing(function: object, dynamic: bool | None = None) -> object:
        given.append((function, dynamic))
        return function

    monkeypatch.setattr(compiled_blocks.torch, "compile", compile_nothing)
    return given


def test_the_outermost_are_compiled_once_for_each_class(as_it_is: list[object]) -> None:
    stage = Stage(Layer(0.0), Layer(0.0), Counted())
    blocks = CompiledBlocks(stage, spec())
    x = torch.rand(3, 4)
    expected = stage(x)

    assert blocks.knows(None)
    with blocks.compiled(None):
        assert torch.equal(stage(x), expected)

    assert names(stage, blocks.chosen[True]) == ["layers.0", "layers.1", "layers.2"]
    assert as_it_is == [(Layer.forward, None), (Counted.forward, None)]
    assert not any("forward" in vars(module) for module in stage.modules())


def test_a_stage_without_blocks_is_one(as_it_is: list[object]) -> None:
    stage = nn.Sequential(nn.Linear(4, 4))
    own = type("Own", (Scale,), {"__module__": __name__})()

    assert names(own, _chosen(own)) == [""]
    with pytest.warns(UserWarning, match="Sequential has no block for torch.compile"):
        assert _chosen(stage) == ()


def _chosen(stage: nn.Module) -> tuple[nn.Module, ...]:
    blocks = CompiledBlocks(stage, spec())
    assert blocks.knows(None)
    return blocks.chosen[True]


def test_what_draws_is_left_out_and_its_parts_are_not(as_it_is: list[object]) -> None:
    """In eval mode nothing draws."""
    stage = Stage(Layer(0.5), Layer(0.0))
    blocks = CompiledBlocks(stage, spec())

    def numbers() -> SeededRandom:
        return SeededRandom(0, 0, 0, (0,))

    @contextlib.contextmanager
    def drawing(random: SeededRandom) -> Iterator[None]:
        with OverDraws(random):
            yield

    x, random = torch.rand(3, 4), numbers()
    assert not blocks.knows(random)
    with drawing(random), blocks.watch(random):
        expected = stage(x)
    assert blocks.knows(random)
    random = numbers()
    with drawing(random), blocks.compiled(random):
        assert torch.equal(stage(x), expected)
    stage.eval()
    assert blocks.knows(None)

    assert names(stage, blocks.chosen[True]) == ["layers.0.scale", "layers.1"]
    assert names(stage, blocks.chosen[False]) == ["layers.0", "layers.1"]


def test_what_training_writes_to_and_what_segments_begin_in_is_left_out(
    as_it_is: list[object],
) -> None:
    stage = Stage(Counted(), Layer(0.0), Layer(0.0))
    segments = {"layers.1": (), "layers.2.scale": ()}
    blocks = CompiledBlocks(stage, spec(writes=("layers.0",), segments=segments))
    assert blocks.knows(None)
    assert names(stage, blocks.chosen[True]) == ["layers.1", "layers.2.scale"]
    stage.eval()
    assert blocks.knows(None)
    assert names(stage, blocks.chosen[False]) == ["layers.0", "layers.1", "layers.2.scale"]

    with blocks.compiled(None):
        stage(torch.rand(3, 4))
    assert {dynamic for _, dynamic in as_it_is} == {False}


def test_backwards_in_parts_are_refused() -> None:
    for kind in ScheduleKind:
        if kind in (ScheduleKind.ZB_H1, ScheduleKind.ZBV):
            with pytest.raises(UsageError, match=f"--compile: the schedule {kind.value}"):
                refuse_compiled(kind, WeightSharding.NONE)
            continue
        refuse_compiled(kind, WeightSharding.OPTIMIZER)
        with pytest.raises(UsageError, match="--compile: with --shard full"):
            refuse_compiled(kind, WeightSharding.FULL)


def test_a_compiler_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(compiled_blocks.torch, "compile", broken)
    with warnings.catch_warnings(), pytest.raises(PipelineError) as raised:
        check_compiler([torch.device("cpu"), torch.device("cpu")])

    assert "torch.compile does not work here on cpu: no compiler here" in raised.value.problem
    assert "and much more" not in str(raised.value)
    assert "a C++ compiler such as g++" in raised.value.hint
