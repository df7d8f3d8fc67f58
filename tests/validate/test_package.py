"""Validation finds what is wrong with a package, however small.

Starting a process takes seconds, so most packages are checked in this one; that the process is one
in which this compiler cannot be imported, and that its crash is told, is tested apart.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import EmitError, ValidationError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets import torch_stages
from gpipe_compiler.validate.package import Validation, validate

OPTIONS = CompileOptions(
    stages=2,
    microbatches=2,
    cluster=Cluster.of(DEFAULT_HOST, Link(1e18, 0.0)),
)


class Residual(nn.Module):
    """A skip over both stages, a tied weight, a BatchNorm and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x)))
        return self.last(self.drop(h)) + x * 0.01


def subject(model: nn.Module | None = None) -> Subject:
    torch.manual_seed(0)
    return Subject(
        "residual",
        model or Residual(),
        args=(torch.randn(8, 6),),
        target=torch.randn(8, 6),
        loss_fn=F.mse_loss,
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_subject(subject(), OPTIONS, tmp_path_factory.mktemp("out") / "residual_x2")


def edited(compiled: Compiled, tmp_path: Path, file: str, old: str, new: str) -> Validation:
    """The validation of a copy of the package in which a text is replaced."""
    assert compiled.directory is not None
    copy = tmp_path / "copy"
    shutil.copytree(compiled.directory, copy)
    text = (copy / file).read_text()
    assert old in text, text
    (copy / file).write_text(text.replace(old, new))
    return validate(subject(), compiled.plan, copy)


def test_sound_package_passes(compiled: Compiled) -> None:
    """Outputs, loss, gradients, buffers and weights are compared, each of them."""
    assert compiled.validation is not None

    counts = {row.what: row.compared for row in compiled.validation.rows}

    assert compiled.validation.passed
    assert counts == {"output": 1, "loss": 1, "gradient": 5, "buffer": 3, "weight": 5}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("stage_0.py", "x * 0.01", "x * 0.0099", "output"),
        ("schedule.py", "Reduction.MEAN", "Reduction.SUM", "gradient"),
        ("schedule.py", "random_ops=(0,)", "random_ops=(1,)", "loss"),
        ("stage_0.py", "nn.BatchNorm1d(6)", "nn.BatchNorm1d(6, momentum=0.11)", "buffer"),
    ],
    ids=["term", "reduction", "mask", "statistics"],
)
def test_faulty_package_is_found(
    compiled: Compiled, tmp_path: Path, file: str, old: str, new: str, what: str
) -> None:
    """A changed term, mask, weight of the loss or statistic shows in its row."""
    validation = edited(compiled, tmp_path, file, old, new)

    assert what in {row.what for row in validation.rows if not row.passed}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage_1.py", "def loss(", "def loss_of_old("),
        ("schedule.py", "1F1 1B1 1B0", "1F1 1B1 1B1"),
    ],
    ids=["no loss", "doubled action"],
)
def test_package_that_does_not_run_is_told(
    compiled: Compiled, tmp_path: Path, file: str, old: str, new: str
) -> None:
    with pytest.raises(ValidationError, match="does not run"):
        edited(compiled, tmp_path, file, old, new)


def test_package_may_not_lean_on_the_compiler(compiled: Compiled, tmp_path: Path) -> None:
    """The process that runs the package cannot import gpipe_compiler."""
    with pytest.raises(ValidationError, match="gpipe_compiler"):
        edited(compiled, tmp_path, "__init__.py", "import torch\n", "import gpipe_compiler\n")


@pytest.mark.usefixtures("in_process")
def test_failed_package_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands where the package was to go; what failed stands beside it, named so."""

    def spoil(subject: Subject, plan: Plan, folder: Path, **options: Any) -> Validation:
        stage = folder / "stage_0.py"
        stage.write_text(stage.read_text().replace("x * 0.01", "x * 0.02"))
        return validate(subject, plan, folder, **options)

    monkeypatch.setattr(torch_stages, "validate", spoil)
    with pytest.raises(ValidationError, match="loss loss differs") as raised:
        compile_subject(subject(), OPTIONS, tmp_path / "bad")

    assert raised.value.exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["bad.failed"]
    assert "bad.failed" in raised.value.hint


@pytest.mark.usefixtures("in_process")
def test_model_that_mixes_samples_is_explained(tmp_path: Path) -> None:
    """Outputs that depend on the other samples are those of the micro-batch where that is accepted.

    Its loss is no mean over samples, which is told apart (`test_loss_splitting.py`).
    """

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 4)
            self.out = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.out(torch.relu(self.embed(x)))
            return h - h.mean(0)

    made = compile_subject(
        dataclasses.replace(
            subject(Contrast()), loss_fn=lambda output, target: output.square().mean()
        ),
        dataclasses.replace(OPTIONS, per_microbatch=True),
        tmp_path / "mixes",
    )

    assert made.validation is not None
    assert made.validation.passed
    assert "compared with the plain loop of micro-batches" in " ".join(made.validation.notes)


def test_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = compile_subject(subject(), OPTIONS, None)

    assert made.directory is None
    assert list(tmp_path.iterdir()) == []


def test_taken_place_is_refused_before_the_work(tmp_path: Path) -> None:
    """A folder that is no package is never replaced, and the model is not even traced."""
    (tmp_path / "mine.txt").write_text("mine")
    told: list[str] = []
    with pytest.raises(EmitError, match="is no package"):
        compile_subject(subject(), dataclasses.replace(OPTIONS, force=True), tmp_path, told.append)

    assert told == []
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.usefixtures("in_process")
def test_model_is_left_as_it_is(tmp_path: Path) -> None:
    """Compiling and validating change neither parameters, nor buffers, nor gradients, nor mode."""
    given = subject()
    given.model.eval()
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    compile_subject(given, OPTIONS, tmp_path / "out")

    after = given.model.state_dict()

    assert not given.model.training
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in given.model.parameters())
