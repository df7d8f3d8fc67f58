"""The command that shows a package: what it prints, draws and writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_compiler.cli import main as cli
from gpipe_compiler.plan import Plan

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def package(workplace: Path, plan: Plan) -> Path:
    folder = workplace / "model_x2"
    folder.mkdir()
    (folder / "plan.json").write_text(plan.to_json())
    return folder


class TestInspect:
    def test_prints_stages_boundaries_and_prediction(self, package: Path, capsys: Printed) -> None:
        assert cli.inspect_command(["model_x2"]) == 0

        out = capsys.readouterr().out
        assert "4x2" in out
        assert "/u/m.py:5" in out
        assert "proved optimal" in out

    def test_takes_a_plan_file_too(self, package: Path) -> None:
        assert cli.inspect_command(["model_x2/plan.json"]) == 0

    def test_json(self, package: Path, plan: Plan, capsys: Printed) -> None:
        assert cli.inspect_command(["model_x2", "--json"]) == 0

        assert Plan.from_json(capsys.readouterr().out) == plan

    def test_draws_the_pipeline(self, package: Path, workplace: Path, capsys: Printed) -> None:
        pytest.importorskip("grandalf")

        assert cli.inspect_command(["graph", "model_x2"]) == 0
        assert capsys.readouterr().out == "model.svg\n"
        assert "<svg" in (workplace / "model.svg").read_text()

    def test_draws_a_stage(self, package: Path, workplace: Path) -> None:
        pytest.importorskip("grandalf")

        assert cli.inspect_command(["graph", "model_x2", "--stage", "1", "-o", "x.svg"]) == 0
        assert "model, stage 1" in (workplace / "x.svg").read_text()

    def test_writes_a_trace(self, package: Path, workplace: Path, capsys: Printed) -> None:
        assert cli.inspect_command(["trace", "model_x2"]) == 0

        assert capsys.readouterr().out == "model_trace.json\n"
        assert json.loads((workplace / "model_trace.json").read_text())["traceEvents"]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (
                "nowhere",
                "error: there is no package nowhere\n"
                "  hint: name the directory that gpipe-compile wrote\n",
            ),
            (
                ".",
                "error: . is no package: it has no plan.json\n"
                "  hint: name the directory that gpipe-compile wrote\n",
            ),
            (
                "graph model_x2 --stage 2",
                "error: there is no stage 2\n  hint: stages count from 0 to 1\n",
            ),
            (
                "graph model_x2 -o x.png",
                "error: pictures are written as SVG, not as x.png\n"
                "  hint: -o name.svg; browsers show it, rsvg-convert or Inkscape make a PNG of "
                "it\n",
            ),
            (
                "graph model_x2 -o none/x.svg",
                "error: none/x.svg: No such file or directory\n",
            ),
        ],
    )
    def test_bad_ones_end_with_2(
        self, words: str, said: str, package: Path, capsys: Printed
    ) -> None:
        assert cli.inspect_command(words.split()) == 2

        assert capsys.readouterr().err == said

    def test_a_reader_who_has_seen_enough(self, package: Path) -> None:
        command = f"{sys.executable} -c 'from gpipe_compiler.cli.main import *; inspect_command()'"
        words = f"{command} model_x2 --json | true"

        finished = subprocess.run(words, shell=True, check=True, capture_output=True, text=True)

        assert finished.stderr == ""

    @pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1]", "nonsense"])
    def test_a_broken_plan_ends_with_1(self, text: str, package: Path, capsys: Printed) -> None:
        (package / "plan.json").write_text(text)

        assert cli.inspect_command(["model_x2"]) == 1
        told = capsys.readouterr().err
        assert told.startswith("error: model_x2/plan.json: ")
        assert "hint: compile the package again" in told
