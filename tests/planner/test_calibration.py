"""Op times that are scaled by what a package took."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cli import asked
from gpipe_compiler.cli.arguments import compile_parser
from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.errors import UsageError
from gpipe_compiler.options import Calibration, CompileOptions, LossChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets.planning import plan_as_asked, planner_of

CLUSTER = Cluster.of(Device("flat", 1e9, 1e18, 1 << 34, 0.0), Link(1e18, 0.0))


@pytest.fixture(scope="module")
def graph() -> gpc.Graph:
    layers = (nn.Linear(64, 64) for _ in range(4))
    return gpc.trace(nn.Sequential(*layers), torch.randn(8, 64), loss=LossChoice.SUM_OF_SQUARES)


def planned(graph: gpc.Graph, calibration: Calibration | None) -> Plan:
    options = CompileOptions(stages=2, microbatches=4, cluster=CLUSTER, calibration=calibration)
    return plan_as_asked(planner_of(graph, options), options, lambda _: None)[0]


def test_forwards_and_backwards_take_as_much_longer(graph: gpc.Graph):
    plain, scaled = planned(graph, None), planned(graph, Calibration(2.0, 3.0, "it"))

    for one, other in zip(plain.stages, scaled.stages, strict=True):
        assert other.forward_s == pytest.approx(2 * one.forward_s)
        assert other.backward_s == pytest.approx(3 * one.backward_s)
        assert other.weight_s == pytest.approx(3 * one.weight_s)
    # The whole model on one device takes what its ops take.
    forward = sum(stage.forward_s for stage in plain.stages) * plain.microbatches
    backward = sum(stage.backward_s for stage in plain.stages) * plain.microbatches
    one, other = plain.whole[0].step_s, scaled.whole[0].step_s
    assert other - one == pytest.approx(forward + 2 * backward)


def test_the_plan_says_so_and_remembers_it(graph: gpc.Graph):
    plan = planned(graph, Calibration(2.0, 3.0, "it"))

    assert "times 2 forward and 3 backward, as it took" in plan.cost_source
    assert Plan.from_json(plan.to_json()).calibration == (2.0, 3.0)
    assert planned(graph, None).calibration == (1.0, 1.0)


def options_of(file: Path, *words: str) -> CompileOptions:
    arguments = compile_parser().parse_args(
        ["model.py", "--stages", "2", "--devices", "H100", "--calibration", str(file), *words]
    )
    return asked.options_of(arguments, 2)


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"forward": 1.5, "backward": 2, "measured": "it"}))

    assert options_of(file).calibration == Calibration(1.5, 2.0, "it")
    with pytest.raises(UsageError, match="for stages of torch"):
        options_of(file, "--target", "onnxruntime", "--mode", "infer")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"forward": 1}',
        '{"forward": 0, "backward": 1, "measured": "it"}',
        '{"forward": 1e999, "backward": 1, "measured": "it"}',
        '{"forward": "x", "backward": 1, "measured": "it"}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)

    with pytest.raises(UsageError, match="is no calibration"):
        options_of(file)


def test_calibrated_costs_leave_work_and_bytes_as_they_are(graph: gpc.Graph):
    options = CompileOptions(stages=2, cluster=CLUSTER)
    costs = planner_of(graph, options).prepare(4, options).costs[0]
    scaled = costs.calibrated(Calibration(2.0, 3.0, "it"))

    for name, cost in costs.ops.items():
        assert scaled.ops[name].flops == cost.flops
        assert scaled.ops[name].bytes == cost.bytes
    assert costs.calibrated(None) is costs
    assert dataclasses.replace(scaled, ops={}, source="") == dataclasses.replace(
        costs, ops={}, source=""
    )
