"""`gpipe-inspect memory`, against the plan's own replay and against plans made as it advises.

A remedy is told for the same stages. So a plan that is made with its setting, and whose stages are
pinned, must come to the same bytes on every device.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_compiler.cli import main as cli
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster, built_in
from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Constraints, LossChoice, Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import Category
from gpipe_compiler.plan.stages import Remedy
from gpipe_compiler.planner.memory_advice import what_if
from gpipe_compiler.planner.memory_fit import remeasured
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import most_over
from gpipe_compiler.runtime.spec import OptimizerKind, Precision, Remat, ScheduleKind

Printed = pytest.CaptureFixture[str]
BATCH, M, K = 96, 4, 2
PINNED = Constraints(pins=(("blocks.0", 0), ("blocks.1", 0), ("blocks.2", 1), ("blocks.3", 1)))


class Blocks(nn.Module):
    """Four blocks, whose widths differ so that no two tensors of a stage are of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16), nn.GELU())
            for width in (96, 64, 80, 48)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return trace(Blocks(), torch.randn(BATCH, 16), loss=LossChoice.SUM_OF_SQUARES)


def bench_of(graph: Graph, memory: int = 2**30) -> Planner:
    device = dataclasses.replace(DEFAULT_HOST, memory=memory)
    return Planner(graph, Cluster.of(device, IN_PROCESS), constraints=PINNED)


def planned(planner: Planner, policy: Policy, microbatches: int = M) -> Plan:
    return planner.plan(planner.choose(K, microbatches, policy), policy)


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    """With all that is told of its memory."""
    planner = bench_of(graph)
    made = planned(planner, Policy())
    return dataclasses.replace(made, what_if=what_if(planner, made, Policy()))


def remedies(plan: Plan) -> dict[str, Remedy]:
    assert plan.what_if is not None
    return {remedy.change: remedy for remedy in plan.what_if.remedies}


SETTINGS: dict[str, tuple[Policy, int]] = {
    "--microbatches 8": (Policy(), 8),
    "--remat full": (Policy(remat=RematChoice.FULL), M),
    "--schedule 1f1b": (Policy(schedule=ScheduleKind.ONE_F_ONE_B), M),
    "--schedule 1f1b --remat full": (
        Policy(schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.FULL),
        M,
    ),
    "--schedule 1f1b --microbatches 8": (Policy(schedule=ScheduleKind.ONE_F_ONE_B), 8),
    "--precision bf16": (Policy(precision=Precision.BF16), M),
}


@pytest.mark.parametrize("words", SETTINGS)
def test_a_remedy_is_what_a_plan_made_with_it_comes_to(
    words: str, graph: Graph, plan: Plan
) -> None:
    policy, microbatches = SETTINGS[words]
    made = planned(bench_of(graph), policy, microbatches)
    remedy = remedies(plan)[words]

    assert [stage.ops for stage in made.stages] == [stage.ops for stage in plan.stages]
    assert remedy.device_bytes == made.prediction.device_bytes
    assert remedy.device_bytes != plan.prediction.device_bytes
    assert remedy.step_s == pytest.approx(made.prediction.step_s, rel=1e-6)


def test_every_remedy_is_held_against_a_plan(plan: Plan) -> None:
    """But for AUTO, which the next test holds."""
    assert {words for words in remedies(plan) if "auto" not in words} == set(SETTINGS)


def test_so_much_memory_is_enough_to_recompute_in_part(graph: Graph, plan: Plan) -> None:
    (words,) = (words for words in remedies(plan) if "auto" in words)
    remedy = remedies(plan)[words]
    full = remedies(plan)["--remat full"]
    assert words == f"--remat auto --memory {-(-max(remedy.device_bytes) * 100 // 1024) / 100:g}KiB"
    assert max(full.device_bytes) < max(remedy.device_bytes) < max(plan.prediction.device_bytes)
    assert plan.prediction.step_s < remedy.step_s

    memory = -(-max(remedy.device_bytes) * 100 // 1024) * 1024 // 100 + 1
    made = planned(bench_of(graph, memory), Policy(remat=RematChoice.AUTO))

    assert not most_over(made)
    assert any(stage.remat is not Remat.NONE for stage in made.stages)


def test_an_optimizer_counts_in_the_remedies(graph: Graph) -> None:
    policy = Policy(optimizer=OptimizerKind.ADAM)
    planner = bench_of(graph)
    made = planned(planner, policy)
    told = dataclasses.replace(made, what_if=what_if(planner, made, policy))
    other = planned(planner, dataclasses.replace(policy, remat=RematChoice.FULL))

    assert remedies(told)["--remat full"].device_bytes == other.prediction.device_bytes


def test_nothing_is_told_twice_of_a_plan_that_does_so_already(graph: Graph) -> None:
    policy = Policy(
        schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.FULL, precision=Precision.BF16
    )
    planner = bench_of(graph)
    made = planned(planner, policy, BATCH)
    told = dataclasses.replace(made, what_if=what_if(planner, made, policy))

    assert set(remedies(told)) == {"--schedule gpipe"}


def test_inference_has_no_remedies_of_training(graph: Graph) -> None:
    infer = trace(Blocks(), torch.randn(BATCH, 16), training=False)
    planner = bench_of(infer)
    made = planned(planner, Policy())
    told = dataclasses.replace(made, what_if=what_if(planner, made, Policy()))

    assert set(remedies(told)) == {"--microbatches 8", "--precision bf16"}


class TestCommand:
    @pytest.fixture
    def package(self, tmp_path: Path, plan: Plan) -> Path:
        (tmp_path / "plan.json").write_text(plan.to_json())
        return tmp_path

    def document(self, package: Path, capsys: Printed, *words: str) -> dict[str, Any]:
        assert cli.inspect_command(["memory", str(package), "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def test_the_plan_comes_back_whole(self, plan: Plan) -> None:
        assert Plan.from_json(plan.to_json()) == plan

    def test_peaks_are_those_of_a_replay(self, package: Path, plan: Plan, capsys: Printed) -> None:
        again = remeasured(plan, OptimizerKind.SGD).prediction.memory
        found = self.document(package, capsys)

        for device, told in zip(found["devices"], again, strict=True):
            assert device["peak"] == told.peak
            assert sum(device["sizes"].values()) == told.peak
            assert device["action"] == told.action
            assert max(peak for _, peak, _ in device["points"]) == told.peak

    def test_the_holders_are_all_of_the_peak(self, plan: Plan) -> None:
        """Category by category, also as few as one by one."""
        for memory in remeasured(plan, OptimizerKind.SGD).prediction.memory:
            for shown in (memory, memory.shortened(holders=3)):
                assert sum(holder.bytes for holder in shown.holders) == memory.peak
                for category in Category:
                    own = [h.bytes for h in shown.holders if h.category is category]
                    assert sum(own) == memory.of(category)

    def test_what_is_told_of_a_tensor_is_so(self, package: Path, capsys: Printed) -> None:
        """A tanh of 24 x 96 numbers, which M - 1 or M micro-batches have left."""
        found = self.document(package, capsys, "--device", "0")
        (device,) = found["devices"]
        (tanh,) = (h for h in device["holders"] if h["what"] == "24x96 float32")

        source = Path(__file__).read_text().split("\n")
        line = source.index("            x = block(x)") + 1
        assert tanh["module"] == "blocks.0.1"
        assert tanh["call"] == "Tanh"
        assert tanh["category"] == "activations"
        assert tanh["count"] in (M - 1, M)
        assert tanh["bytes"] == tanh["count"] * 24 * 96 * 4
        assert tanh["source"].endswith(f"test_inspect_memory.py:{line}")

    def test_prints_tables(
        self, package: Path, plan: Plan, capsys: Printed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "180")  # so that no cell folds
        assert cli.inspect_command(["memory", str(package)]) == 0

        out = capsys.readouterr().out
        for words in remedies(plan):
            assert words in out
        for said in (
            "what holds the peak of device 0 (stage 0)",
            "what holds the peak of device 1 (stage 1)",
            "24x96 float32",
            "blocks.0.1 Tanh",
            "test_inspect_memory.py:",
            "least memory",
            "as it is",
        ):
            assert said in out

    def test_the_rows_of_a_gpu_are_all_that_it_needs(
        self, tmp_path: Path, graph: Graph, capsys: Printed
    ) -> None:
        """Tensors and workspaces, what the allocator keeps, a margin, and the context."""
        planner = Planner(graph, Cluster.of(built_in("A100").device, IN_PROCESS))
        made = planned(planner, Policy())
        (tmp_path / "plan.json").write_text(made.to_json())
        found = self.document(tmp_path, capsys)

        for device, needed in zip(found["devices"], made.prediction.device_bytes, strict=True):
            assert device["needed"] == needed
            tensors = sum(holder["bytes"] for holder in device["holders"])
            assert tensors + sum(device["beyond_tensors"].values()) == needed
            assert device["beyond_tensors"][
                "kept by PyTorch's allocator (reserved - allocated)"
            ] == (device["reserved"] - device["peak"])
            assert all(size > 0 for size in device["beyond_tensors"].values())
            assert any(holder["category"] == "workspaces" for holder in device["holders"])

    def test_layers_that_repeat_are_one_row(
        self, tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alike = Blocks()
        alike.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        graph = trace(alike, torch.randn(BATCH, 16), loss=LossChoice.SUM_OF_SQUARES)
        planner = Planner(graph, Cluster.of(DEFAULT_HOST, IN_PROCESS))
        made = planned(planner, Policy())
        (tmp_path / "plan.json").write_text(made.to_json())

        monkeypatch.setenv("COLUMNS", "180")
        assert cli.inspect_command(["memory", str(tmp_path), "--device", "0"]) == 0
        told = capsys.readouterr().out.split("\n")
        (row,) = (line for line in told if "blocks.*.* Tanh" in line and "activations" in line)
        first = [op for op in made.stages[0].ops if "blocks" in made.note_of[op].module]
        modules = {made.note_of[op].module for op in first if made.note_of[op].label == "Tanh"}
        found = re.search(r"in (\d+) modules", row)
        assert found is not None
        assert 1 < int(found[1]) <= len(modules)  # what is handed to the next stage is apart

    def test_of_one_device_so_many(self, package: Path, capsys: Printed) -> None:
        assert cli.inspect_command(["memory", str(package), "--device", "1", "--top", "1"]) == 0

        out = capsys.readouterr().out
        assert "peak of device 1" in out
        assert "peak of device 0" not in out
        assert out.count("float32") == 1
        assert "smaller ones" in out

    def test_a_device_that_is_not_there(self, package: Path, capsys: Printed) -> None:
        assert cli.inspect_command(["memory", str(package), "--device", "2"]) == 2
        assert capsys.readouterr().err == (
            "error: there is no device 2\n  hint: devices count from 0 to 1\n"
        )

    def test_a_plan_that_tells_nothing(self, package: Path, plan: Plan, capsys: Printed) -> None:
        bare = dataclasses.replace(plan.prediction, memory=())
        (package / "plan.json").write_text(dataclasses.replace(plan, prediction=bare).to_json())

        assert cli.inspect_command(["memory", str(package)]) == 2
        assert "does not say what holds its memory" in capsys.readouterr().err

    def test_a_plan_without_remedies(self, package: Path, plan: Plan, capsys: Printed) -> None:
        (package / "plan.json").write_text(dataclasses.replace(plan, what_if=None).to_json())

        assert cli.inspect_command(["memory", str(package)]) == 0
        assert "packages compiled with --remedies say" in capsys.readouterr().out
