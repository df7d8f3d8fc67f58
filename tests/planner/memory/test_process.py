"""What a process takes on a host, against its peak of resident memory."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_compiler.cli import arguments, asked
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.cluster.local import process_bytes
from gpipe_compiler.compile import trace
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.train.told import Told, planned_to_give_back
from gpipe_compiler.targets.torch_stages import emit

BASE = 300 * 2**20
SCRIPT = """
import runpy, sys
sys.argv = [sys.argv[1], "train", "--steps", "3"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    lines = open("/proc/self/status").read().splitlines()
    print("most", *(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


class Wide(nn.Module):
    """Tensors of many sizes, among them those of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        widths = (64, 96, 80, 128, 112)
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in widths)
        self.back = nn.ModuleList(nn.Linear(width, 16) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).flatten(2).transpose(1, 2)
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + back(torch.nn.functional.gelu(layer(x)))
        return x.mean((1, 2))


def planned(memory: int, base: int = BASE, samples: int = 8) -> Plan:
    graph = trace(Wide(), torch.randn(samples, 3, 64, 64), loss=LossChoice.SUM_OF_SQUARES)
    device = dataclasses.replace(DEFAULT_HOST, memory=memory, kept_free=base)
    planner = Planner(graph, Cluster.of(device, IN_PROCESS))
    return planner.plan(planner.choose(1, 2, Policy()), Policy())


class TestPlan:
    def test_the_process_is_counted_in_the_memory_of_the_device(self) -> None:
        plan = planned(2**40)
        (held,) = plan.prediction.memory
        shape = (
            4 * 64 * 64 * (3 + 16) * 4
        )  # of a micro-batch: what the convolution reads and writes

        assert held.reserved == held.peak + shape
        assert plan.prediction.device_bytes == (-(-held.reserved * 102 // 100) + BASE,)

    def test_freed_memory_is_kept_where_there_is_room(self) -> None:
        plan = planned(2**40)
        (held,) = plan.prediction.memory
        assert plan.process is not None
        assert plan.process.keeps_freed
        assert plan.process.tensors[0] >= 1.6 * held.reserved

        tight = planned(plan.prediction.device_bytes[0])
        assert tight.process is not None
        assert not tight.process.keeps_freed
        assert tight.process.base + tight.process.tensors[0] == tight.prediction.device_bytes[0]

    def test_a_host_of_which_nothing_is_known_counts_tensors(self) -> None:
        plan = planned(2**40, base=0)
        assert plan.process is None
        assert plan.prediction.device_bytes == (plan.prediction.memory[0].peak,)
        assert "process" not in json.loads(plan.to_json())["prediction"]

    def test_it_is_written_and_read(self, tmp_path: Path) -> None:
        plan = planned(2**40)
        (tmp_path / "plan.json").write_text(plan.to_json())
        assert Plan.from_json(plan.to_json()).process == plan.process
        assert not planned_to_give_back(tmp_path)

        tight = planned(plan.prediction.device_bytes[0])
        (tmp_path / "plan.json").write_text(tight.to_json())
        assert planned_to_give_back(tmp_path)
        told = Told._read(json.loads(tight.to_json()), alone=True).process
        assert told == (tight.process.base, tight.process.tensors)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what was resident")
@pytest.mark.parametrize("room", ["tight", "wide"])
def test_a_process_takes_no_more_than_was_told(room: str, tmp_path: Path) -> None:
    """However much room there is: tight, it gives freed memory back."""
    base = process_bytes()
    memory = 2**40 if room == "wide" else planned(2**40, base).prediction.device_bytes[0]
    plan = planned(memory, base)
    emit(plan, tmp_path / "package")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "package" / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    most = 1024 * int(done.stdout.split("most ")[1].split()[0])
    assert plan.process is not None
    assert plan.process.keeps_freed is (room == "wide")
    assert base < most <= plan.process.base + plan.process.tensors[0]
    assert plan.prediction.memory[0].peak > base / 4  # else the test would say nothing


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        (["model.py"], True),
        (["model.py", "--memory", "1GB"], True),
        (["model.py", "--memory", "200MB"], False),  # less than any process takes
        (["graph.json", "--memory", "1GB"], False),  # of whatever will run it
    ],
)
def test_memory_is_that_of_tensors_where_no_process_can_be_meant(
    words: list[str], counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = dataclasses.replace(DEFAULT_HOST, kept_free=BASE)
    monkeypatch.setattr(asked, "devices_named", lambda devices: Cluster.of(host, IN_PROCESS))
    parsed = arguments.compile_parser().parse_args([*words, "--stages", "2"])
    (device,) = asked.cluster_asked(parsed).devices
    assert device.kept_free == (BASE if counted else 0)
