"""Packages that recompute, normalise otherwise or run in 16 bits, against the plain model.

The references of `validate` are compared with still plainer ones: running statistics of layers that
read the input itself are those that eager PyTorch takes from the whole batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import LossChoice, RematChoice
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind
from gpipe_compiler.validate.package import Validation, validate
from gpipe_compiler.validate.plain_run import MiniBatchStatistics

OPTIONS = CompileOptions(
    stages=2,
    microbatches=4,
    cluster=Cluster.of(DEFAULT_HOST, IN_PROCESS),
)
BATCH = 8


class Normalised(nn.Module):
    """BatchNorm as a module and as a function, on both sides of a cut, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))
        self.last = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x)))
        h = self.second(self.drop(h))
        h = F.batch_norm(h, self.mean, self.var, training=self.training, momentum=0.2)
        return self.last(torch.tanh(h)) + x


def subject() -> Subject:
    torch.manual_seed(0)
    return Subject(
        "normalised",
        Normalised(),
        args=(torch.randn(BATCH, 6),),
        target=torch.randn(BATCH, 6),
        loss_fn=F.mse_loss,
    )


def compiled(folder: Path, **options: object) -> Compiled:
    chosen = dataclasses.replace(OPTIONS, **options)  # type: ignore[arg-type]  # as the tests give them
    return compile_subject(subject(), chosen, folder / "normalised_x2")


def legal(batchnorm: BatchNorm, schedule: ScheduleKind) -> bool:
    return batchnorm is not BatchNorm.EXACT or schedule is ScheduleKind.GPIPE


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("batchnorm", "schedule", "remat"),
    [
        case
        for case in itertools.product(BatchNorm, ScheduleKind, (RematChoice.NONE, RematChoice.FULL))
        if legal(case[0], case[1])
    ],
)
def test_every_way_to_normalise_equals_the_plain_model(
    tmp_path: Path, batchnorm: BatchNorm, schedule: ScheduleKind, remat: RematChoice
) -> None:
    made = compiled(tmp_path, batchnorm=batchnorm, schedule=schedule, remat=remat)

    assert made.validation is not None
    assert made.validation.passed, str(made.validation)
    counts = {row.what: row.compared for row in made.validation.rows}
    assert counts == {"output": 1, "loss": 1, "gradient": 8, "buffer": 5, "weight": 8}
    assert made.plan.batchnorm is batchnorm
    assert bool(made.plan.joint) == (batchnorm is BatchNorm.EXACT)
    assert {stage.remat for stage in made.plan.stages} == {remat.planned}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("remat", [RematChoice.NONE, RematChoice.FULL])
def test_16_bits_equal_the_plain_model_under_autocast(
    tmp_path: Path, precision: Precision, remat: RematChoice
) -> None:
    lower = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}[precision]

    made = compiled(tmp_path, precision=precision, remat=remat)

    assert made.validation is not None
    assert made.validation.passed, str(made.validation)
    crossing = {c.value: c.dtype for c in made.plan.crossings if c.gradient}
    assert lower in crossing.values()
    assert f"precision=Precision.{precision.name}" in schedule_of(made)


@pytest.mark.usefixtures("in_process")
def test_exact_normalisation_in_16_bits_allows_stages_without_it_their_micro_batches(
    tmp_path: Path,
) -> None:
    """The gradients of the wide last layer are sums in bfloat16 in the plain model."""
    torch.manual_seed(0)
    head = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)]
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), *head)
    inputs, target = torch.randn(32, 6), torch.randint(5, (32,))
    options = dataclasses.replace(OPTIONS, batchnorm=BatchNorm.EXACT, precision=Precision.BF16)

    made = compile_subject(
        Subject("wide", model, (inputs,), target=target, loss_fn=F.cross_entropy),
        options,
        tmp_path / "wide_x2",
    )

    assert len(made.plan.joint) == 1
    assert made.validation is not None
    gradients = next(row for row in made.validation.rows if row.what == "gradient")
    assert 1e-4 < gradients.relative <= gradients.tolerance


class LooksAtTypes(nn.Module):
    """Under autocast its first layer gives bfloat16, and it doubles that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.exp(h) * (1.0 if h.dtype is torch.float32 else 2.0))


@pytest.mark.usefixtures("in_process")
def test_a_model_that_looks_at_types_is_followed(tmp_path: Path) -> None:
    model = Subject(
        "types", LooksAtTypes(), (torch.randn(BATCH, 6),), loss=LossChoice.SUM_OF_SQUARES
    )
    options = dataclasses.replace(OPTIONS, precision=Precision.BF16)

    made = compile_subject(model, options, tmp_path / "types_x2")

    assert made.validation is not None
    assert made.validation.passed


def schedule_of(made: Compiled) -> str:
    assert made.directory is not None
    return (made.directory / "schedule.py").read_text()


def edited(made: Compiled, tmp_path: Path, replaced: dict[str, str]) -> Validation:
    """The validation of a copy of the package whose schedule says something else."""
    assert made.directory is not None
    copy = tmp_path / "copy"
    shutil.copytree(made.directory, copy)
    text = schedule_of(made)
    for old, new in replaced.items():
        assert old in text, text
        text = text.replace(old, new)
    (copy / "schedule.py").write_text(text)
    return validate(subject(), made.plan, copy)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("options", "replaced", "what"),
    [
        (
            {"batchnorm": BatchNorm.DEFERRED},
            {"batchnorm=BatchNorm.DEFERRED": "batchnorm=BatchNorm.MICRO"},
            "buffer",
        ),
        (
            {"batchnorm": BatchNorm.EXACT},
            {"batchnorm=BatchNorm.EXACT": "batchnorm=BatchNorm.DEFERRED"},
            "gradient",
        ),
        (
            {"precision": Precision.BF16},
            {"precision=Precision.BF16": "precision=Precision.FP32"},
            "gradient",
        ),
        (
            {"remat": RematChoice.FULL},
            {"writes=stage_0.WRITES": "writes=()"},
            "buffer",
        ),
    ],
    ids=["deferred", "exact", "bf16", "state written twice"],
)
def test_another_manner_is_found(
    tmp_path: Path, options: dict[str, object], replaced: dict[str, str], what: str
) -> None:
    """Validation tells a package that computes in another way than planned."""
    made = compiled(tmp_path, **options)

    validation = edited(made, tmp_path, replaced)

    assert what in {row.what for row in validation.rows if not row.passed}


@pytest.mark.usefixtures("in_process")
def test_facts_that_are_as_by_default_are_not_written(tmp_path: Path) -> None:
    plain = compile_subject(
        Subject(
            "plain",
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            (torch.ones(4, 4),),
            loss=LossChoice.SUM_OF_SQUARES,
        ),
        dataclasses.replace(OPTIONS, validate=False),
        tmp_path / "plain_x2",
    )

    text = schedule_of(plain)
    for word in ("writes", "mixes", "remat", "Remat", "batchnorm", "BatchNorm", "precision"):
        assert word not in text
    written = schedule_of(compiled(tmp_path, remat=RematChoice.FULL, validate=False))
    assert written.count("remat=Remat.FULL") == 2
    assert written.count("mixes=True") == 2


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    made = compiled(folder, validate=False)
    assert made.directory is not None
    return made.directory


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--batchnorm deferred",
        "--batchnorm exact --remat full",
        "--precision bf16 --remat full --schedule 1f1b",
        "--precision fp16 --batchnorm deferred",
        "--batchnorm deferred --batch-size 7",
    ],
)
def test_a_package_checks_itself_in_any_manner(
    package: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """`run.py check` takes other manners than planned, and uneven micro-batches."""
    assert ran(package, monkeypatch, words) == 0


def test_a_package_refuses_what_its_schedule_cannot_do(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(package, monkeypatch, "--batchnorm exact --schedule 1f1b") == 2
    assert "exact" in capsys.readouterr().err


def ran(package: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> object:
    """The exit code of `run.py check`, run in this process."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", [str(package / "run.py"), "check", *words.split()])
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(package / "run.py"), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    return ended.value.code


def test_statistics_of_a_mini_batch_are_those_eager_pytorch_takes_from_it() -> None:
    """A BatchNorm that reads the input, one without a momentum, and one that is called twice."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)
            self.average = nn.BatchNorm1d(5, momentum=None)
            self.twice = nn.BatchNorm1d(5, momentum=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + self.average(x) + self.twice(2 * x) + self.twice(x + 1)

    torch.manual_seed(0)
    whole, parts = Layers(), Layers()
    for _ in range(2):
        x = torch.randn(12, 5)
        whole(x)
        statistics = MiniBatchStatistics(parts)
        for part in x.split(3):
            with statistics.microbatch():
                parts(part)
        statistics.commit()

    expected = dict(whole.named_buffers())
    for name, buffer in parts.named_buffers():
        assert torch.allclose(buffer, expected[name], atol=1e-6), name
    assert int(parts.norm.num_batches_tracked) == 2


def test_exact_normalisation_needs_the_gpipe_schedule(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the schedule 1f1b cannot do that"):
        compiled(tmp_path, batchnorm=BatchNorm.EXACT, schedule=ScheduleKind.ONE_F_ONE_B)
    assert list(tmp_path.iterdir()) == []
