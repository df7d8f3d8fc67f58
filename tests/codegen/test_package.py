"""Where a package is written, and where it is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gpipe_compiler.codegen import package
from gpipe_compiler.errors import EmitError
from gpipe_compiler.frontend.subject import Hooks
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets.torch_stages import emit

FILES = {
    "README.md",
    "__init__.py",
    "plan.json",
    "report.html",
    "run.py",
    "runtime",
    "schedule.py",
    "stage_0.py",
    "stage_1.py",
    "weights",
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def plan(planned: Callable[..., Plan]) -> Plan:
    return planned(Tied(), torch.rand(4, 4), count=2)


def test_ruff_finds_nothing_in_a_package(plan: Plan, tmp_path: Path) -> None:
    """By its own rules, at its own width, the runtime included."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", emit(plan, tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_what_is_in_a_package(plan: Plan, tmp_path: Path) -> None:
    """All files are there, the runtime without caches; nothing stands beside the folder."""
    told: list[str] = []

    written = emit(plan, tmp_path / "new" / "out", progress=told.append)

    assert {path.name for path in written.iterdir()} == FILES
    assert list(written.rglob("__pycache__")) == []
    assert [path.name for path in written.parent.iterdir()] == ["out"]
    assert told
    assert Plan.from_json((written / "plan.json").read_text()) == plan


def test_a_shared_tensor_is_stored_once(plan: Plan, tmp_path: Path) -> None:
    """The index names a file for every tensor, canonical names only, under the model's names."""
    written = emit(plan, tmp_path / "out")

    index = json.loads((written / "weights" / "index.json").read_text())

    assert sorted(index["weight_map"]) == [
        "first.bias",
        "first.weight",
        "second.bias",
    ]
    stored = {
        name
        for file in set(index["weight_map"].values())
        for name in load_file(written / "weights" / file)
    }
    assert stored == set(index["weight_map"])
    assert index["metadata"]["total_size"] == 4 * (16 + 4 + 4)
    assert (written / "weights" / "example.safetensors").is_file()


def test_what_is_frozen_stays_frozen(
    planned: Callable[..., Plan], load: Callable[[Path], ModuleType], tmp_path: Path
) -> None:
    """Whole modules, single parameters of a module, and one that two modules share."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), Tied())
    frozen = {"0.weight", "1.weight", "1.bias", "2.bias", "3.first.weight"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)

    made = load(emit(planned(model, torch.rand(4, 4), count=1), tmp_path / "out"))

    (stage,) = made.SPEC.stages
    found = {stage.state[own]: p.requires_grad for own, p in stage.module().named_parameters()}
    assert found == {name: p.requires_grad for name, p in model.named_parameters()}


def test_an_existing_folder_is_left_alone(plan: Plan, tmp_path: Path) -> None:
    target = tmp_path / "out"
    emit(plan, target)
    (target / "mine").touch()

    with pytest.raises(EmitError, match="exists") as caught:
        emit(plan, target)

    assert "--force" in caught.value.hint
    assert (target / "mine").exists()


def test_force_replaces_a_package(plan: Plan, tmp_path: Path) -> None:
    """All of it: files of the old package do not stay."""
    target = tmp_path / "out"
    emit(plan, target)
    (target / "stage_7.py").touch()

    emit(plan, target, force=True)

    assert {path.name for path in target.iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_force_replaces_nothing_but_a_package(plan: Plan, tmp_path: Path, kind: str) -> None:
    """A folder of something else, a file and a link stay as they are."""
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
        (target / "thesis.txt").touch()
    elif kind == "file":
        target.touch()
    else:
        target.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(EmitError, match="no package"):
        emit(plan, target, force=True)

    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_write_leaves_nothing(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    there: bool,
) -> None:
    """Neither a half package, nor a temporary folder, nor parents; an old package stays."""
    target = tmp_path / "parent" / "out"
    if there:
        emit(plan, target)
        (target / "mine").touch()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(package, "write_weights", fail)

    with pytest.raises(EmitError if isinstance(error, OSError) else KeyboardInterrupt):
        emit(plan, target, force=there)

    left = sorted(path.name for path in tmp_path.rglob("*") if path.parent != target)
    assert ("mine" in {path.name for path in tmp_path.rglob("*")}) is there
    assert (left[:1] == []) is not there


def test_a_failed_move_brings_the_old_package_back(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    emit(plan, target)
    (target / "mine").touch()
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if Path(to) == target and self.name != "old":
            raise OSError(13, "Permission denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)

    with pytest.raises(EmitError, match="Permission denied"):
        emit(plan, target, force=True)

    assert (target / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_plan_without_a_graph_has_no_code(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(EmitError, match="no graph"):
        emit(Plan.from_json(plan.to_json()), tmp_path / "out")


def test_a_meta_model_has_no_weights(planned: Callable[..., Plan], tmp_path: Path) -> None:
    """The stages then initialise themselves, tied weights included."""
    with torch.device("meta"):
        model = Tied()
    plan = planned(model, torch.rand(4, 4, device="meta"), count=2)

    written = emit(plan, tmp_path / "out")

    assert list((written / "weights").iterdir()) == []
    assert "WEIGHTS: Path | None = None" in (written / "__init__.py").read_text()


@pytest.mark.parametrize("name", ["my-out.v1", "class", "ein Ordner", "1"])
def test_a_folder_may_be_called_anything(
    plan: Plan, tmp_path: Path, load: Callable[[Path], Any], name: str
) -> None:
    """The package runs where it is moved to, too."""
    emit(plan, tmp_path / "out")
    moved = shutil.move(tmp_path / "out", tmp_path / name)

    pipe = load(Path(moved)).Pipeline(devices=["cpu"])

    x = torch.rand(4, 4)
    assert plan.graph is not None
    with pipe:
        torch.testing.assert_close(
            pipe.eval()(x),
            torch.func.functional_call(Tied(), dict(plan.graph.tensors), x),
        )


def test_the_users_file_is_there_for_its_hooks(plan: Plan, tmp_path: Path) -> None:
    """Only when it offers any."""
    file = tmp_path / "model.py"
    file.write_text("def train_data():\n    return ()\n")
    with_hooks = Hooks(file, "", frozenset({"train_data", "metrics", "eval_data"}))
    without = Hooks(file, "", frozenset())

    offered = emit(plan, tmp_path / "a", hooks=with_hooks)
    nothing = emit(plan, tmp_path / "b", hooks=without)

    assert (offered / "hooks" / "model.py").read_text() == file.read_text()
    assert 'HOOKS = "hooks/model.py"' in (offered / "run.py").read_text()
    assert "The file with eval_data, metrics and train_data." in (offered / "run.py").read_text()
    assert "HOOKS" not in (nothing / "run.py").read_text()
    assert not (nothing / "hooks").exists()


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)


def test_a_type_that_files_cannot_hold_is_refused(
    planned: Callable[..., Plan], tmp_path: Path
) -> None:
    """safetensors has complex64 only."""
    plan = planned(Filter(), torch.rand(4, 4, dtype=torch.float64), count=1)

    with pytest.raises(EmitError, match=r"filter is of the type complex128"):
        emit(plan, tmp_path / "out")
