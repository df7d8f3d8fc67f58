"""What the tests of the commands share: a plan made by hand, and a directory with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpipe_compiler.cli import asked
from gpipe_compiler.cluster import IN_PROCESS, Cluster, Device
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.plan.stages import OpNote
from gpipe_compiler.runtime.schedule.actions import parse_order
from gpipe_compiler.runtime.spec import Crossing, ScheduleKind

TOY = Cluster.of(Device("toy", 1e9, 1e9, 10**6, 1e-6), IN_PROCESS)

PLAN = Plan(
    name="model",
    stages=(
        Stage(0, ("a",), (), ("x",), ("a",), ("a.weight",), 0.1, 0.2, 0, 0, 24, 6, 100),
        Stage(1, ("b",), (), ("a",), ("b",), ("b.weight",), 0.1, 0.2, 32, 32, 16, 4, 100),
    ),
    crossings=(Crossing("a", 0, (1,), (4, 2), torch.float32),),
    schedule=ScheduleKind.GPIPE,
    microbatches=2,
    batch_size=8,
    training=True,
    orders=(parse_order("0F0 0F1 0B1 0B0"), parse_order("1F0 1F1 1B1 1B0")),
    cluster=TOY,
    cost_source="estimated for toy",
    prediction=Prediction(0.9, 0.3, 1 / 3, 0.9, True, (248, 232)),
    noted=(
        OpNote("a", "Linear", ("x",), ("a",), ("4x2 float32",), "a", ("a.weight",), "/u/m.py:5"),
        OpNote("b", "Linear", ("a",), ("b",), ("4x2 float32",), "b", ("b.weight",), "/u/m.py:6"),
    ),
)


@pytest.fixture
def plan() -> Plan:
    """A plan of two stages."""
    return PLAN


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(asked, "devices_named", lambda name: TOY)
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build_model():\n    print('building')\n    return nn.Linear(3, 2)\n\n"
        "def example_inputs():\n    return torch.ones(8, 3)\n\n"
        "def example_target():\n    return torch.ones(8, 2)\n\n"
        "loss_fn = nn.functional.mse_loss\n"
    )
    yield tmp_path
    sys.modules.pop("model", None)
