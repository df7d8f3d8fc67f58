"""Values that no option expects: an answer and its exit code, and never a traceback."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import CODES, VALUES, files, options

from gpipe_compiler.cli import arguments
from gpipe_compiler.cli import main as cli
from gpipe_compiler.plan import Plan

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

def example_inputs():
    return torch.rand(4, 4)

def example_target():
    return torch.rand(4, 4)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""

GRAPH = {
    "ops": [
        {
            "name": name,
            "forward_s": 1e-3,
            "backward_s": 2e-3,
            "output_bytes": 1e3,
            "parameter_bytes": 0,
        }
        for name in "abc"
    ],
    "edges": [["a", "b"], ["b", "c"]],
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    return tmp_path


@pytest.mark.parametrize("option", options(arguments.compile_parser()))
def test_compile_options(option: str, workplace: Path) -> None:
    """Of a graph, which is planned at once: most are understood, or refused as they stand."""
    for value in VALUES:
        words = ["graph.json", f"{option}={value}", "--dry-run"]
        words += [] if option == "--stages" else ["--stages=2"]
        assert cli.compile_command(words) in CODES, value


@pytest.mark.parametrize("words", [[], ["memory"], ["graph"], ["trace"]], ids=str)
def test_inspecting_what_is_no_package(words: list[str], workplace: Path) -> None:
    for file in files(workplace):
        assert cli.inspect_command([*words, str(file)]) in {1, 2}, file
        assert cli.inspect_command(
            [*words, f"--{'json' if words != ['graph'] else 'stage=0'}", str(file)]
        ) in {1, 2}


def test_compiling_what_is_no_model(workplace: Path) -> None:
    for file in files(workplace):
        for suffix in (".py", ".json", ".onnx"):
            path = workplace / f"model{suffix}"
            path.unlink(missing_ok=True)
            path.symlink_to(file)
            assert cli.compile_command([str(path), "--stages=2", "--dry-run"]) in {1, 2}, path


def test_clusters_that_are_none(workplace: Path) -> None:
    for file in files(workplace):
        words = ["graph.json", "--stages=2", "--dry-run", f"--cluster={file}"]
        assert cli.compile_command(words) in {1, 2}, file


def mutations(document: object) -> Iterator[object]:
    """The document with any one value in it replaced by what does not belong there."""
    yield from (None, -1, 10**30, 1e308, "", "x\x1b", [], {}, [[]], True)
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in [*items][:12]:
        for changed in mutations(value):
            copied = copy.copy(document)
            copied[key] = changed
            yield copied
        if isinstance(document, dict):
            yield {other: document[other] for other in document if other != key}


def test_plans_that_are_damaged(workplace: Path, plan: Plan) -> None:
    """Every value of a plan replaced by others, of other types and sizes."""
    commands = [[], ["memory"], ["graph", "-o", "x.svg"], ["trace", "-o", "x.json"]]
    asked = itertools.cycle(commands)
    codes = set()
    for changed in mutations(json.loads(plan.to_json())):
        (workplace / "plan.json").write_text(json.dumps(changed))
        codes.add(cli.inspect_command([*next(asked), "plan.json"]))
    assert codes <= {0, 1, 2}
    assert 1 in codes


PRINTING = """
import sys
from gpipe_compiler.cli import main as cli
sys.exit(cli.compile_command(["graph.json", "--stages=2", "--dry-run"]))
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_a_stdout_of_another_encoding(
    encoding: str, plan: Plan, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "plan.json").write_text(dataclasses.replace(plan, name="名前 → µ").to_json())
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))

    assert cli.inspect_command(["plan.json"]) == 0
    text = raw.getvalue().decode(encoding)
    assert "stages" in text
    assert "名前 → µ" in text or r"\u540d\u524d ->" in text


def test_a_pipe_that_nobody_reads_on(workplace: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PRINTING]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)

    assert (done.returncode, done.stderr) == (0, "")


CLOSING = """
import sys
sys.stdout.close()
sys.stderr.close()
"""


def test_a_model_file_that_closes_stdout(workplace: Path) -> None:
    (workplace / "model.py").write_text(CLOSING + MODEL)
    command = [sys.executable, "-c", PRINTING.replace("graph.json", "model.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0
    assert "dry run: nothing written" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_stdout_that_is_full(workplace: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-c", PRINTING]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="asks a shell to close stdout")
def test_a_stdout_that_is_closed(workplace: Path) -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, PRINTING]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


MEASURED = """
from pathlib import Path

def resident():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

own_build = build_model

def build_model():
    blocks = [b"1" * 2**23 for _ in range(32)]
    held = resident()
    del blocks[::2]
    Path("resident.txt").write_text(str(held - resident()))
    return own_build()
"""
"""Lets go of every other of 32 blocks of 8 MiB, and says how many KiB its process then lacks."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what is resident")
def test_large_blocks_that_are_freed_are_given_back(workplace: Path) -> None:
    """What a model's kernels take and let go of, each of a size of its own, would add up."""
    (workplace / "model.py").write_text(MODEL + MEASURED)
    command = [sys.executable, "-c", PRINTING.replace("graph.json", "model.py")]
    subprocess.run(command, capture_output=True, check=True)

    assert int((workplace / "resident.txt").read_text()) > 120 * 2**10
