"""The page on schedules: what it says is done to a copy of the compiler, which trains by it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gpipe_compiler

PAGE = Path(__file__).parents[3] / "docs" / "adding_a_schedule.md"

MODEL = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

def example_inputs():
    return torch.randn(6, 4),

def example_target():
    return torch.randn(6, 4)

loss_fn = nn.MSELoss()
"""


def test_the_schedule_of_the_page_trains_a_model(tmp_path: Path) -> None:
    """By a file, and two lines of another: with the numbers of the plain model."""
    copied = tmp_path / "gpipe_compiler"
    shutil.copytree(gpipe_compiler.__path__[0], copied, ignore=lambda *_: ["__pycache__"])
    file, kind, entry = re.findall(r"^ *```\w*\n(.*?)^ *```", PAGE.read_text(), re.M | re.S)[:3]
    runtime = copied / "runtime"
    (runtime / "schedule" / "one_after_another.py").write_text(file)
    for path, before, line in (
        ("schedule/choosing.py", '    GPIPE = "gpipe"', kind.strip()),
        ("schedule/choosing.py", "    ScheduleKind.GPIPE: Schedule(", entry.strip()),
        (
            "schedule/choosing.py",
            "from .placement",
            "from .one_after_another import one_after_another",
        ),
    ):
        text = (runtime / path).read_text()
        assert before in text
        indent = " " * (len(before) - len(before.lstrip()))
        (runtime / path).write_text(text.replace(before, f"{indent}{line}\n{before}", 1))
    (tmp_path / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "gpipe_compiler", "model.py", "--stages", "2"]
    command += ["--microbatches", "3", "--schedule", "one-after-another"]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"weight: 8 tensors", done.stdout)
    assert "0F0 0B0 0F1 0B1 0F2 0B2" in (tmp_path / "model_x2" / "schedule.py").read_text()
