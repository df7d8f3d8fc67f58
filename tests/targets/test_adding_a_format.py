"""The page on output formats: what it says is done, and the format that it makes is used."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpipe_compiler import targets
from gpipe_compiler.cli.main import compile_command

PAGE = Path(__file__).parents[2] / "docs" / "adding_an_output_format.md"

MODEL = '''
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    """Modules, functions, methods and operators; a skip, a tied weight, dropout, a slice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x, mask):
        h = self.norm(self.first(x)) * self.scale
        y = F.dropout(torch.relu(self.layers(h)), 0.5, self.training)
        tied = F.linear(y, self.first.weight) + h
        return {"y": tied.masked_fill(mask, 0.0), "parts": (h[:, 1:3], y.double().sum(1))}


def build_model():
    torch.manual_seed(0)
    return Model()


def example_inputs():
    return torch.randn(8, 8), torch.rand(8, 8) > 0.5
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's folder among the targets, its line in their table; gone afterwards."""
    writer, runner, line = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    made = tmp_path / "formats" / "json_stages"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(writer, encoding="utf-8")
    (made / "run.py").write_text(runner, encoding="utf-8")
    monkeypatch.setattr(targets, "__path__", [str(made.parent), *targets.__path__])
    monkeypatch.setitem(
        targets.TARGETS, "json", eval(f"{{{line}}}", {"OutputFormat": targets.OutputFormat})["json"]
    )
    importlib.invalidate_caches()
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    _forget_imports()
    yield made
    _forget_imports()


def _forget_imports() -> None:
    ours = re.compile(r"runtime(\..*)?|gpipe_compiler\.targets\.json_stages(\..*)?")
    for name in [name for name in sys.modules if ours.fullmatch(name)]:
        del sys.modules[name]


COMMAND = ["model.py", "--stages", "3", "--microbatches", "4", "--mode", "infer"]


def test_the_format_of_the_page_equals_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("gpipe_compiler.targets.json_stages.run")  # as tools and tests do
    assert compile_command([*COMMAND, "--target", "json", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)["validation"]
    assert found["passed"]
    assert [row["compared"] for row in found["rows"]] == [3]
    assert "a second batch too" in " ".join(found["notes"])
    assert all(json.loads(Path(f"model_x3/stage_{k}.json").read_text())["ops"] for k in range(3))
    x, mask = torch.randn(5, 8), torch.rand(5, 8) > 0.5
    model = runpy.run_path("model.py")["build_model"]().eval()
    pipeline = runpy.run_path("model_x3/run.py")["Pipeline"]()
    torch.testing.assert_close(pipeline({"x": x, "mask": mask}), model(x, mask))


def test_what_the_command_names_at_its_end_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_command([*COMMAND, "--target", "json", "--no-validate"]) == 0

    _, (python, *words), people = map(str.split, capsys.readouterr().out.splitlines()[-3:])
    assert (python, words) == ("python", ["model_x3/run.py", "infer"])
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    assert all(Path(name.strip(",;")).exists() for name in people[2:4])


def test_an_interpreter_that_is_wrong_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = folder / "run.py"
    right = 'return named(op["function"])(*args, **kwargs)'
    assert right in script.read_text()
    script.write_text(script.read_text().replace(right, f"{right} * 1.01"))

    assert compile_command([*COMMAND, "--target", "json"]) == 3

    assert "does not reproduce the model" in capsys.readouterr().err
    assert not Path("model_x3").exists()


def test_a_block_that_it_lacks_is_refused_with_the_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = "with torch.autocast('cpu', torch.bfloat16):\n            h = self.first(x)"
    Path("model.py").write_text(
        MODEL.replace("h = self.norm(self.first(x))", f"{block}\n        h = h")
    )

    assert compile_command([*COMMAND, "--target", "json"]) == 1

    told = capsys.readouterr().err
    assert "model.py:19: what runs under no_grad or autocast" in told
    assert "use --target torch" in told


def test_training_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_command(["model.py", "--stages", "2", "--target", "json"]) == 2

    assert "add --mode infer" in capsys.readouterr().err
