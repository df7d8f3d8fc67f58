"""Values that no option expects: an answer and its exit code, and never a traceback."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpipe_compiler import arguments, cli

HOSTILE = (
    "",
    " ",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e999999999999999999999",
    "9" * 30,
    "9" * 5000,
    "1" + "0" * 18,
    "٣",
    "²",
    "½",
    "\udcff",
    "\x00",
    "a\nb",
    "é=1",
    "=",
    "x=9" + "9" * 5000,
    "/",
    "s3://bucket/x",
    "%s%(prog)s",
    "[/x]",
    "x" * 300,
    "../" * 2000,
)

CODES = {0, 1, 2, 3}

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


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option of a parser that takes a value."""
    for action in parser._actions:
        if action.option_strings and action.nargs != 0:
            yield action.option_strings[-1]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    return tmp_path


@pytest.mark.parametrize("option", options(arguments.compile_parser()))
def test_compile_options(option: str, workplace: Path) -> None:
    """Of a graph, which is planned at once: most are understood, or refused as they stand."""
    for value in HOSTILE:
        words = ["graph.json", f"{option}={value}", "--dry-run"]
        words += [] if option == "--stages" else ["--stages=2"]
        assert cli.compile_command(words) in CODES, value
