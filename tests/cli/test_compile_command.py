"""The command that compiles: what it understands, what it prints, how it fails.

The compiler itself is replaced by one that hands back a plan made by hand; the whole way is run by
the tests of the examples.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_compiler import __main__ as scripts
from gpipe_compiler.cli import commands
from gpipe_compiler.cli import main as cli
from gpipe_compiler.cluster import Cluster, Link
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.errors import Notice, SourceLocation, TraceError, ValidationError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import LossChoice, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind
from gpipe_compiler.runtime.train.comparison import Row
from gpipe_compiler.validate.launching import Launch


@dataclass(frozen=True)
class Outcome:
    """Stands for what the compiler hands back."""

    plan: Plan
    directory: Path | None
    validation: object
    not_validated: str = ""
    frontier: Frontier | None = None
    batch: str = ""
    under_torchrun: bool = True


@dataclass(frozen=True)
class Held:
    """Stands for a validation."""

    rows: tuple[Row, ...] = (Row("output", 1, 1e-7, 2e-7, 1e-3, "y", ()),)
    passed: bool = True
    notes: tuple[str, ...] = ("it mixes samples",)


@dataclass
class Compiler:
    """Stands for the compiler: keeps what it is asked for, or fails as it is told."""

    plan: Plan
    error: BaseException | None = None
    subject: Subject | None = None
    options: CompileOptions | None = None
    directory: Path | None = None

    def __call__(
        self,
        subject: Subject,
        options: CompileOptions,
        directory: Path | None,
        progress: Callable[[str], None],
        _launch: Launch,
    ) -> Outcome:
        progress("tracing")
        self.subject, self.options, self.directory = subject, options, directory
        if self.error is not None:
            raise self.error
        placed = directory.absolute() if directory else None
        return Outcome(self.plan, placed, Held() if options.validate and directory else None)


@pytest.fixture
def compiler(workplace: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler(plan)
    monkeypatch.setattr(commands, "compile_model", stand_in)
    return stand_in


Printed = pytest.CaptureFixture[str]


def test_notices_are_lines_of_their_own(
    compiler: Compiler, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noticing(*given: Any) -> Outcome:
        for text in ("model.py:3: if x.max() > 2: left out", "model.py:4: [b]", "model.py:4: [b]"):
            with quiet():  # forgets which warnings were shown
                pass
            warnings.warn(Notice(text), stacklevel=1)
        return compiler(*given)

    monkeypatch.setattr(commands, "compile_model", noticing)
    assert cli.compile_command(["model.py", "--stages", "2"]) == 0
    printed = capsys.readouterr().err
    assert printed == "note: model.py:3: if x.max() > 2: left out\nnote: model.py:4: [b]\n"


class TestCompileArguments:
    def test_defaults(self, compiler: Compiler) -> None:
        assert cli.compile_command(["model.py", "--stages", "4"]) == 0

        assert compiler.options == CompileOptions(stages=4, cluster=compiler.plan.cluster)
        assert compiler.directory == Path("model_x4")
        assert compiler.subject is not None
        assert compiler.subject.name == "model"

    def test_everything(self, compiler: Compiler) -> None:
        words = (
            "model.py --stages 2 --microbatches 8 --schedule 1f1b "
            "--per-microbatch --cost measured --bandwidth 12.5G --latency 2ms --input 16x3 -o here "
            "--force --no-validate --seed 7 --remat auto --batchnorm deferred --precision bf16 "
            "--memory 16GiB --loss sum-of-squares"
        )

        assert cli.compile_command(words.split()) == 0
        assert compiler.options == CompileOptions(
            stages=2,
            microbatches=8,
            schedule=ScheduleKind.ONE_F_ONE_B,
            remat=RematChoice.AUTO,
            batchnorm=BatchNorm.DEFERRED,
            precision=Precision.BF16,
            per_microbatch=True,
            must_fit=True,
            measured=True,
            cluster=Cluster.of(
                dataclasses.replace(compiler.plan.cluster.devices[0], memory=16 * 2**30),
                Link(12.5e9, 2e-3),
            ),
            validate=False,
            force=True,
            seed=7,
        )
        assert compiler.directory == Path("here")
        assert compiler.subject is not None
        assert compiler.subject.args[0].shape == (16, 3)
        assert compiler.subject.loss is LossChoice.SUM_OF_SQUARES

    def test_inference(self, compiler: Compiler) -> None:
        assert cli.compile_command(["model.py", "--stages", "2", "--mode", "infer"]) == 0

        assert compiler.options is not None
        assert not compiler.options.training
        assert compiler.subject is not None
        assert not compiler.subject.training

    def test_the_seed_fixes_random_inputs(self, compiler: Compiler) -> None:
        drawn = []
        for seed in ("1", "1", "2"):
            cli.compile_command(
                ["model.py", "-k", "2", "--input", "4x3", "--seed", seed, "--dry-run"]
            )
            assert compiler.subject is not None
            drawn.append(compiler.subject.args[0])

        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("model.py", "how many stages?"),
            ("model.py --stages 2 --sweep 1,2", "--sweep for how many devices"),
            ("model.py --batch auto", "--batch auto: for how many stages?"),
            ("model.py --sweep 1,,2", "write numbers, such as 1,2,4,8"),
            ("--stages 2", "the following arguments are required: MODEL"),
            (
                "model.py --stages 0",
                "argument -k/--stages: '0' is no whole number from 1",
            ),
            ("model.py --stages two", "'two' is no whole number from 1"),
            ("model.py --stages 2 --microbatches -1", "argument -m/--microbatches"),
            ("model.py --stages 2 --bandwidth fast", "write bytes/s, such as 12.5G"),
            ("model.py --stages 2 --bandwidth 0", "'0' is no bandwidth"),
            ("model.py --stages 2 --latency 3h", "'3h' is no time: write seconds"),
            ("model.py --stages 2 --memory much", "write bytes, such as 16GiB"),
            ("model.py --stages 2 --memory 0", "'0' is no size"),
            ("model.py --stages 2 --memory 16Gib", "'16Gib' is no size"),
            ("model.py --stages 2 --remat some", "invalid choice: 'some'"),
            ("model.py --stages 2 --batchnorm sync", "invalid choice: 'sync'"),
            ("model.py --stages 2 --precision int8", "invalid choice: 'int8'"),
            (
                "model.py --stages 2 --batchnorm exact --schedule 1f1b",
                "the schedule 1f1b cannot do that",
            ),
            ("model.py --stages 2 --mode infer --remat full", "with --mode infer there is none"),
            ("model.py --stages 2 --schedule zero", "invalid choice: 'zero'"),
            ("model.py --stages 2 --what", "unrecognized arguments: --what"),
        ],
    )
    def test_bad_ones_end_with_2(
        self, words: str, said: str, compiler: Compiler, capsys: Printed
    ) -> None:
        assert cli.compile_command(words.split()) == 2

        printed = capsys.readouterr()
        assert said in printed.err
        assert printed.out == ""

    @pytest.mark.parametrize(
        ("words", "size"),
        [("2048", 2048), ("8e9", 8 * 10**9), ("1.5KiB", 1536), ("80GB", 80 * 10**9), ("7MB", 7e6)],
    )
    def test_sizes_of_memory(self, compiler: Compiler, words: str, size: int) -> None:
        assert cli.compile_command(["model.py", "-k", "2", "--memory", words]) == 0

        assert compiler.options is not None
        assert compiler.options.cluster.devices[0].memory == size

    def test_help(self, capsys: Printed) -> None:
        assert cli.compile_command(["--help"]) == 0

        assert "MODEL" in capsys.readouterr().out


class TestCompilePrints:
    def test_a_summary_and_how_to_run_it(self, compiler: Compiler, capsys: Printed) -> None:
        cli.compile_command(["model.py", "--stages", "2"])

        out = capsys.readouterr().out
        for line in ("stages 2", "ops 2", "parameters 10", "bubble 33.3%"):
            assert line in " ".join(out.split())
        assert "900 ms (proved optimal)" in out
        assert "output: 1 tensor, largest difference 1e-07" in out
        assert "it mixes samples" in out
        assert "  python model_x2/run.py train\n" in out
        assert "  torchrun --nproc-per-node 2 model_x2/run.py train\n" in out

    def test_a_dry_run_prints_the_whole_plan(self, compiler: Compiler, capsys: Printed) -> None:
        cli.compile_command(["model.py", "--stages", "2", "--dry-run"])

        out = capsys.readouterr().out
        assert compiler.directory is None
        assert "/u/m.py:5" in out
        assert "dry run: nothing written" in out
        assert "run.py" not in out

    def test_json_is_all_there_is_on_stdout(self, compiler: Compiler, capsys: Printed) -> None:
        assert cli.compile_command(["model.py", "--stages", "2", "--json"]) == 0

        printed = capsys.readouterr()
        document = json.loads(printed.out)
        assert document["directory"] == str(Path.cwd() / "model_x2")
        assert document["plan"]["prediction"]["step_s"] == 0.9
        assert document["validation"] == {
            "passed": True,
            "rows": [dataclasses.asdict(Held().rows[0]) | {"faults": []}],
            "notes": ["it mixes samples"],
        }
        assert "building" in printed.err

    def test_json_of_a_dry_run(self, compiler: Compiler, capsys: Printed) -> None:
        cli.compile_command(["model.py", "--stages", "2", "--json", "--dry-run"])

        document = json.loads(capsys.readouterr().out)
        assert (document["directory"], document["validation"]) == (None, None)


class TestCompileFails:
    def test_there_is_no_file(self, compiler: Compiler, workplace: Path, capsys: Printed) -> None:
        assert cli.compile_command(["nothing.py", "--stages", "2"]) == 2

        assert capsys.readouterr().err == (
            f"error: there is no file nothing.py; {workplace} has model.py\n"
            "  hint: check the path, it is relative to here\n"
        )

    def test_the_model_is_at_fault(
        self, compiler: Compiler, workplace: Path, capsys: Printed
    ) -> None:
        (workplace / "model.py").write_text("def build_model():\n    return 1 / 0\n")

        assert cli.compile_command(["model.py", "--stages", "2"]) == 1
        assert capsys.readouterr().err == (
            "error: model.py:2: build_model() raises ZeroDivisionError: division by zero\n"
            "  hint: the line is the last of your own; run the file with Python to see all of it\n"
        )

    def test_the_directory_is_taken(
        self, compiler: Compiler, workplace: Path, capsys: Printed
    ) -> None:
        (workplace / "model_x2").mkdir()

        assert cli.compile_command(["model.py", "--stages", "2"]) == 2
        assert compiler.options is None
        assert capsys.readouterr().err == (
            "error: model_x2 exists\n"
            "  hint: --force replaces it, -o names another directory, --dry-run writes nothing\n"
        )

    def test_tracing_fails_at_a_line(
        self, compiler: Compiler, workplace: Path, capsys: Printed
    ) -> None:
        where = SourceLocation(str(workplace / "model.py"), 12)
        compiler.error = TraceError("a tensor decides a branch", location=where, hint="torch.where")

        assert cli.compile_command(["model.py", "--stages", "2"]) == 1
        assert capsys.readouterr().err.endswith(
            "error: model.py:12: a tensor decides a branch\n  hint: torch.where\n"
        )

    def test_validation_fails(self, compiler: Compiler, capsys: Printed) -> None:
        compiler.error = ValidationError("fc.weight differs; the package is model_x2.failed")

        assert cli.compile_command(["model.py", "--stages", "2"]) == 3
        assert "error: fc.weight differs" in capsys.readouterr().err

    def test_json_tells_of_the_failure_too(
        self, compiler: Compiler, workplace: Path, capsys: Printed
    ) -> None:
        where = SourceLocation(str(workplace / "model.py"), 12)
        compiler.error = TraceError("a tensor decides a branch", location=where, hint="torch.where")

        assert cli.compile_command(["model.py", "--stages", "2", "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {
            "error": {
                "problem": "a tensor decides a branch",
                "file": str(workplace / "model.py"),
                "line": 12,
                "hint": "torch.where",
                "exit_code": 1,
            }
        }

    def test_the_disk_fails(self, compiler: Compiler, capsys: Printed) -> None:
        compiler.error = PermissionError(13, "Permission denied", "/locked/model_x2")

        assert cli.compile_command(["model.py", "--stages", "2"]) == 2
        assert "error: /locked/model_x2: Permission denied\n" in capsys.readouterr().err

    def test_ctrl_c(
        self, compiler: Compiler, capsys: Printed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler.error = KeyboardInterrupt()
        monkeypatch.setattr(sys, "argv", ["gpipe-compile", "model.py", "--stages", "2"])

        assert scripts.compile_command() == 130
        assert capsys.readouterr().err.endswith("interrupted\n")

    def test_ctrl_c_while_the_command_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
        done = subprocess.run(
            [sys.executable, "-m", "gpipe_compiler", "model.py"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

        assert (done.returncode, done.stderr) == (130, "interrupted\n")

    @pytest.mark.usefixtures("compiler")
    def test_a_mistake_of_ours_shows_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpipe_compiler.cli.commands.compile_model", ord)

        with pytest.raises(TypeError, match="ord"):
            cli.compile_command(["model.py", "--stages", "2"])


class TestForReal:
    """With the compiler itself, up to the plan."""

    COMMAND = ("model.py", "--dry-run", "--stages")

    def test_a_dry_run_says_what_would_save_memory(self, workplace: Path, capsys: Printed) -> None:
        assert cli.compile_command([*self.COMMAND, "1", "--remedies"]) == 0

        out = capsys.readouterr().out
        assert "as it is" in out
        assert "--schedule 1f1b" in out

    def test_a_dry_run_writes_nothing(self, workplace: Path, capsys: Printed) -> None:
        assert cli.compile_command([*self.COMMAND, "1", "--json"]) == 0

        document = json.loads(capsys.readouterr().out)
        plan = Plan.from_json(json.dumps(document["plan"]))
        assert sum(stage.parameter_count for stage in plan.stages) == 8
        assert plan.ops[0].source == ""  # of a model that is one torch.nn module
        assert sorted(path.name for path in workplace.glob("[!_]*")) == ["model.py"]

    def test_more_stages_than_ops(self, workplace: Path, capsys: Printed) -> None:
        assert cli.compile_command([*self.COMMAND, "99"]) == 1

        said = capsys.readouterr().err
        assert "error: 99 stages are more than" in said
        assert "hint: ask for at most" in said

    def test_a_batch_that_does_not_split(self, workplace: Path, capsys: Printed) -> None:
        assert cli.compile_command([*self.COMMAND, "1", "--microbatches", "3"]) == 1

        assert (
            "error: a batch of 8 samples does not split into 3 micro-batches\n"
            "  hint: use 2 or 4 micro-batches, or an example batch of another size; the package "
            "itself runs batches of any size. Where the batch is another "
            "dimension of an input, say so: --batch-dim NAME=1\n"
        ) in capsys.readouterr().err

    def test_a_model_that_raises_when_called(self, workplace: Path, capsys: Printed) -> None:
        (workplace / "model.py").write_text(
            "import torch\nfrom torch import nn\n\nclass Model(nn.Module):\n"
            "    def forward(self, x):\n        return x @ torch.ones(5, 5)\n\n"
            "build_model = Model\n\ndef example_inputs():\n    return torch.ones(8, 3)\n"
        )

        assert cli.compile_command([*self.COMMAND, "1"]) == 1
        said = capsys.readouterr().err
        assert "error: model.py:6: " in said
        assert "RuntimeError" in said
        assert "Traceback" not in said


SPEECHLESS = """
import torch

class Speechless(Exception):
    def __str__(self):
        raise ValueError("no words")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        raise Speechless

def build_model():
    return Model()

def at_once():
    raise Speechless

def example_inputs():
    return torch.randn(8, 4)
"""


@pytest.mark.parametrize("factory", ["", ":at_once"])
def test_an_error_that_cannot_say_what_it_is(
    workplace: Path, capsys: Printed, factory: str
) -> None:
    """Its class stands for it, with the line that raises it."""
    (workplace / "mute.py").write_text(SPEECHLESS)

    code = cli.compile_command([f"mute.py{factory}", "--stages", "2", "--mode", "infer"])

    assert code == 1
    assert "Speechless" in (told := capsys.readouterr().err)
    assert "mute.py:" in told
    assert "Traceback" not in told
    assert not any(line.rstrip().endswith(":") for line in told.splitlines())


def test_a_file_called_torch_is_a_model_like_any_other(tmp_path: Path) -> None:
    """Neither the compiler nor the package that it checks takes it for PyTorch."""
    text = (
        "import torch\n"
        "def build_model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "def example_inputs():\n"
        "    return torch.randn(8, 4)\n"
    )
    (tmp_path / "torch.py").write_text(text)
    words = ["-m", "gpipe_compiler", "torch.py", "--stages", "2", "--mode", "infer"]
    done = subprocess.run(
        [sys.executable, *words], check=False, cwd=tmp_path, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert "validated" in done.stdout


@pytest.mark.parametrize(
    ("own", "measured", "expected"),
    [(None, False, "PASSIVE"), (None, True, None), ("ACTIVE", False, "ACTIVE")],
)
def test_threads_sleep_as_they_wait_but_where_ops_are_timed(monkeypatch, own, measured, expected):
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    if own is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)

    cli.let_threads_sleep(measured=measured)

    assert os.environ.get("OMP_WAIT_POLICY") == expected
