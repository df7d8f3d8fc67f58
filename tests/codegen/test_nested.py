"""The names of what a stage holds, against those of the model."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_package
from torch import Tensor, nn

import gpipe_compiler as gpc
from gpipe_compiler.codegen.constructors import outermost
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.initial import initial_lines
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import StageSpec, Steps, covers
from gpipe_compiler.targets.torch_stages import emit


class Odd(nn.Module):
    """Children that no attribute reaches, tied ones, bare ones, and a parameter called loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scales = nn.ParameterList([torch.rand(4), torch.rand(4)])
        self.lookup = nn.Module()
        self.lookup.keys = nn.Linear(4, 4)
        self.lookup.add_module("0", nn.BatchNorm1d(4))
        self.lookup.add_module('it"s\n', nn.Linear(4, 4))
        self.lookup.register_buffer("items", torch.rand(4))
        self.lookup.register_buffer("values", torch.rand(4), persistent=False)
        self.loss = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scales[0] + self.scales[1]
        x = self.lookup.keys(x) + self.lookup.items + self.lookup.values
        x = getattr(self.lookup, 'it"s\n')(getattr(self.lookup, "0")(x))
        return self.second(x) * self.loss


class Wrapped(nn.Module):
    """Only calls a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Noted(nn.Module):
    """Holds what it does not read: itself, and in a module that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("unread", torch.rand(2))
        self.notes = nn.Module()
        self.notes.register_buffer("scale", torch.rand(4))
        self.notes.register_buffer("seen", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.notes.scale


class Chained(nn.Module):
    """A chain of blocks, whose items are found by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Noted(), nn.Sigmoid(), Noted())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Groups(nn.Module):
    """Lists of lists; modules of torch that are read and not called, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            nn.ModuleList([nn.Linear(4, 4), Wrapped(), nn.LayerNorm(4)]) for _ in range(4)
        )
        self.mixer = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for linear, wrapped, _ in self.groups:
            x = x + wrapped(linear(x))
        mixed = x @ self.mixer.weight.t() + self.mixer.bias
        return mixed + x @ self.attention.in_proj_weight[:4] + self.attention.out_proj.bias


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize("build", [Odd, sequential])
@pytest.mark.parametrize("count", [1, 2])
def test_stages_have_the_keys_and_the_numbers_of_the_model(
    build: Callable[[], nn.Module], count: int, planned: Callable[..., Plan], tmp_path: Any
) -> None:
    torch.manual_seed(0)
    model = build()
    x = torch.rand(4, 4)
    package = load_package(emit(planned(model, x, count=count), tmp_path / "out"))
    load = importlib.import_module(f"{package.__name__}.runtime.core.building")
    store = load.Weights.open(tmp_path / "out" / "weights")
    stages = [load.build_stage(s, store, torch.device("cpu"), 0) for s in package.SPEC.stages]
    expected = model.state_dict()

    held = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    buffers = dict(model.named_buffers())
    assert {n for stage in stages for n, _ in stage.named_buffers()} == buffers.keys()

    values = {package.SPEC.inputs[0].name: x}
    for spec, stage in zip(package.SPEC.stages, stages, strict=True):
        made = stage.train()(*(values[name] for name in spec.inputs))
        values.update(zip(spec.outputs, (made,) if len(spec.outputs) == 1 else made, strict=True))
    assert torch.allclose(values[package.SPEC.outputs.value], model.train()(x))
    for spec, stage in zip(package.SPEC.stages, stages, strict=True):
        for name, buffer in stage.named_buffers():
            assert torch.equal(buffer, buffers[name])
            if not torch.equal(buffer, expected.get(name, buffer)):
                assert covers(spec.writes, name)


def test_blocks_of_a_chain_hold_what_they_do_not_read(tmp_path: Path) -> None:
    model, x = Chained(), torch.rand(8, 4)
    graph = gpc.trace(model, (x,), training=False)
    made = gpc.plan(graph, stages=2, constraints=gpc.Constraints(split_at=("net.2",)))
    pipe = load_package(gpc.emit(made, tmp_path / "out")).Pipeline()

    assert torch.allclose(pipe(x), model(x), atol=1e-6)
    held, expected = pipe.state_dict(), model.state_dict()
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    lines = "".join(path.read_text() for path in (tmp_path / "out").glob("*.py"))
    assert lines.count('"seen"') == 1  # by the class of what holds it alone


@pytest.mark.slow
def test_modules_of_torch_are_constructed_whole_near_what_they_belong_to(tmp_path: Path) -> None:
    """Those that nothing calls, too; unread ones in the stage that has the rest of their list."""
    torch.manual_seed(0)
    model, x = Groups(), torch.rand(8, 4)
    graph = gpc.trace(model, (x,), training=False)
    pins = gpc.Constraints(pins=(("groups.1", 0), ("groups.2", 1)))
    made = gpc.plan(graph, stages=2, microbatches=2, constraints=pins)
    pipe = load_package(gpc.emit(made, tmp_path / "out")).Pipeline()

    assert torch.allclose(pipe(x), model(x), atol=1e-6)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    texts = [(tmp_path / "out" / f"stage_{index}.py").read_text() for index in range(2)]
    assert "self.mixer = nn.Linear(4, 4)" in texts[1]
    assert "self.attention = nn.MultiheadAttention(4, 2)" in texts[1]
    assert not any("nn.Parameter(" in text for text in texts)
    options = ["--strict", "--no-error-summary", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "stage_0.py"],
        cwd=tmp_path / "out",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for stage in pipe.stages.values():
        held = {tuple(name.split(".")[1:3]) for name in stage.state_dict() if "groups" in name}
        assert {group for group, place in held if place == "2"} == {group for group, _ in held}


def test_a_model_that_is_a_module_of_torch_keeps_its_names_apart(
    planned: Callable[..., Plan], tmp_path: Any
) -> None:
    package = load_package(
        emit(planned(nn.Linear(4, 4), torch.rand(4, 4), count=1), tmp_path / "o")
    )

    assert sorted(package.SPEC.stages[0].state.values()) == ["bias", "weight"]


def test_modules_stand_for_just_the_tensors_that_are_meant() -> None:
    present = ("a.b.x", "a.b.y", "a.c.x", "a.cd.x", "e", "f.x")
    for count in range(len(present) + 1):
        for names in itertools.combinations(present, count):
            found = outermost(names, present)
            assert tuple(name for name in present if covers(found, name)) == names
    assert outermost(present, present) == ("a", "e", "f")


BEGINNINGS: Sequence[dict[str, Steps]] = [
    {"l.0.w": (("a",),), "l.1.w": (("a",),), "l.2.w": (("b",),), "l.0.b": (("a",),)},
    {"l.0.w": (("a",),), "l.1.w": (("a",),)},
    {"l.0.w": (("fill_", 0.0),), "l.1.w": (("fill_", -0.0),), "w": (("fill_", 0.0),)},
    {"l.0.m.3.w": (("a",),), "l.1.m.2.w": (("a",),), "l.1.m.w": (("a",),)},
]


@pytest.mark.parametrize("initial", BEGINNINGS)
@pytest.mark.parametrize("others", [(), ("l.2.w", "l.5.m.1.w")])
def test_every_tensor_begins_as_it_is_to(
    initial: dict[str, Steps], others: tuple[str, ...]
) -> None:
    names = tuple(dict.fromkeys((*initial, *others)))
    scope: dict[str, Any] = {}
    exec("\n".join(initial_lines(initial, names, Imports())), scope)
    stage = StageSpec(nn.Identity, (), (), initial=scope["INITIAL"])

    assert {n: repr(stage.beginning(n)) for n in names} == {n: repr(initial.get(n)) for n in names}


def test_as_many_lines_for_many_layers_as_for_two() -> None:
    def lines(layers: int) -> int:
        names = {f"layers.{i}.{w}": (("zero_",),) for i in range(layers) for w in ("w", "b")}
        return len(initial_lines(names, names, Imports()))

    assert lines(30) == lines(2)


class Counting(nn.Module):
    """What counts its calls reads and gives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("one", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        self.calls.add_(self.one)
        return out


def test_a_stage_of_buffers_alone_is_imported(tmp_path: Path) -> None:
    graph = gpc.trace(Counting(), (torch.randn(4, 4),), training=False)
    pins = gpc.Constraints(pins=(("first", 0),))
    made = gpc.plan(graph, stages=2, microbatches=1, constraints=pins)
    assert not made.stages[1].inputs

    package = load_package(gpc.emit(made, tmp_path / "package"))
    with package.Pipeline() as pipe:
        pipe(torch.randn(4, 4))
