"""A small plan made by hand: three stages, a skip over the middle one, an integer on the way."""

from __future__ import annotations

import pytest
import torch

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.plan.stages import OpNote
from gpipe_compiler.runtime.schedule.actions import parse_order
from gpipe_compiler.runtime.spec import Crossing, ScheduleKind

SOURCE = "/home/user/model.py"


def note(name: str, label: str, inputs: str, shape: str, module: str, line: int) -> OpNote:
    return OpNote(
        name, label, tuple(inputs.split()), (name,), (shape,), module, source=f"{SOURCE}:{line}"
    )


@pytest.fixture
def plan() -> Plan:
    """Stages of 1, 2 and 1 seconds forward and twice that backward, links of 1 MB/s.

    ids -> embed -> conv -> add(conv, embed) -> head; GPipe with two micro-batches of four samples.
    """
    notes = (
        note("embed", "Embedding", "ids", "4x8 float32", "embed", 10),
        note("conv", "Conv1d", "embed", "4x8 float32", "body.conv", 20),
        note("relu", "torch.relu", "conv", "4x8 float32", "body", 21),
        note("add", "operator.add", "relu embed", "4x8 float32", "", 12),
        note("head", "Linear", "add ids", "4x2 float32", "head", 13),
    )
    stages = (
        stage(0, "embed", ("ids",), ("embed",), 1.0, parameters=80, receive=0, gradient=0),
        stage(1, "conv relu", ("embed",), ("relu",), 2.0, parameters=24, receive=128, gradient=128),
        stage(
            2,
            "add head",
            ("relu", "embed", "ids"),
            ("head",),
            1.0,
            parameters=18,
            receive=288,
            gradient=256,
        ),
    )
    return Plan(
        name="little",
        stages=stages,
        crossings=(
            Crossing("ids", 0, (2,), (4,), torch.int64, 0, gradient=False),
            Crossing("embed", 0, (1, 2), (4, 8), torch.float32),
            Crossing("relu", 1, (2,), (4, 8), torch.float32),
        ),
        schedule=ScheduleKind.GPIPE,
        microbatches=2,
        batch_size=8,
        training=True,
        orders=tuple(parse_order(f"{s}F0 {s}F1 {s}B1 {s}B0") for s in range(3)),
        cluster=Cluster.of(Device("toy", 1e9, 1e9, 10**6, 1e-6), Link(1e6, 0.0)),
        cost_source="estimated for toy",
        prediction=Prediction(18.0, 6.0, 1 - 24 / 54, 15.0, False, (2000, 3000, 1000)),
        noted=notes,
    )


def stage(
    index: int,
    ops: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    forward_s: float,
    *,
    parameters: int,
    receive: int,
    gradient: int,
) -> Stage:
    return Stage(
        index=index,
        ops=tuple(ops.split()),
        duplicates=(),
        inputs=inputs,
        outputs=outputs,
        state=(),
        forward_s=forward_s,
        backward_s=2 * forward_s,
        receive_bytes=receive,
        gradient_bytes=gradient,
        parameter_bytes=4 * parameters,
        parameter_count=parameters,
        saved_bytes=100,
    )
