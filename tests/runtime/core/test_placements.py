"""Stages on devices in any order, with backwards in two parts, in the threads of one process.

What comes out is compared with plain loops over the whole model, and bit by bit against schedules
that take micro-batches in the same order.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from joint_pipeline import joint_data, joint_spec
from norm_pipeline import data, net_spec
from stateful_pipeline import stateful_data, stateful_spec
from tiny_pipelines import SPECS, data_for, reference, skip_spec, tied_spec

from gpipe_compiler.runtime.checkpoint import Progress, load_checkpoint, save_checkpoint
from gpipe_compiler.runtime.core.engine import Engine
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.schedule import devices_for
from gpipe_compiler.runtime.spec import Remat, ScheduleKind

MICROBATCHES = 5
SAMPLES = 2 * MICROBATCHES
PLACES = {
    "gpipe": (0, 1, 2, 3),
    "1f1b": (0, 1, 2, 3),
    "interleaved": (0, 1, 0, 1),
    "zb-h1": (0, 1, 2, 3),
    "zbv": (0, 1, 1, 0),
}
SPLIT = ("zb-h1", "zbv")

pytestmark = pytest.mark.usefixtures("one_thread")


def parts_of(values):
    pieces = {name: tensor.chunk(MICROBATCHES) for name, tensor in values.items()}
    return [{name: piece[m] for name, piece in pieces.items()} for m in range(MICROBATCHES)]


def snapshot(pipe):
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zbv"])
def test_a_step_is_that_of_the_plain_loop(schedule, name, remat):
    """Skips to several stages, integer crossings, tied weights, losses that are sums."""
    spec = SPECS[name](microbatches=MICROBATCHES)
    stages = [
        dataclasses.replace(stage, writes=tuple(n for n, _ in stage.module().named_buffers()))
        for stage in spec.stages
    ]
    spec = dataclasses.replace(spec, stages=tuple(stages))
    inputs, target, values = data_for(name, SAMPLES)
    with Pipeline(spec, None, schedule=schedule, remat=remat, seed=3) as pipe:
        before = snapshot(pipe)
        loss, outputs = pipe.step_with_outputs(inputs, target)
        expected, gradients, _, buffers = reference(spec, before, parts_of(values), seed=3)

        torch.testing.assert_close(loss, expected)
        assert outputs is not None
        for own, parameter in pipe.named_parameters():
            torch.testing.assert_close(gradients[own], parameter.grad)
        for own, buffer in pipe.named_buffers():
            torch.testing.assert_close(buffers[own], buffer)


@pytest.mark.parametrize("schedule", PLACES)
def test_devices_follow_from_the_schedule(schedule):
    """Whatever the package was compiled for; inference and evaluation go the same ways."""
    spec = skip_spec(microbatches=MICROBATCHES)
    inputs, target, values = data_for("skip", SAMPLES)
    with Pipeline(spec, None, schedule=schedule) as pipe:
        assert pipe.placement == PLACES[schedule]
        total, _, pieces, _ = reference(spec, snapshot(pipe), parts_of(values))
        torch.testing.assert_close(pipe.evaluate(inputs, target), total)
        torch.testing.assert_close(
            pipe(inputs)["y"], torch.cat([piece["y"] for piece in pieces]).detach()
        )


def planned_zbv(**more):
    """As a package compiled for two devices has it, with orders of its own."""
    orders = (
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1 3W1 0W1 3W0 0W0",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 2W1 1W0 1W1 2W0",
    )
    schedule = {"schedule": ScheduleKind.ZBV, "placement": (0, 1, 1, 0), "orders": orders}
    return stateful_spec(microbatches=2, **schedule, **more)


def test_planned_orders_run_where_they_were_planned(monkeypatch):
    """Word by word, with second parts in any order."""
    seen = {}
    run = Engine.run

    def watched(engine, steps, *rest):
        actions = [str(step.action) for step in steps if hasattr(step.action, "phase")]
        seen[min(engine.modules)] = " ".join(actions)
        return run(engine, steps, *rest)

    monkeypatch.setattr(Engine, "run", watched)
    spec = planned_zbv()
    x, target = stateful_data(4)
    with Pipeline(spec, None) as pipe:
        before = snapshot(pipe)
        loss = pipe.step((x,), target)
        parts = [{"x": x[part], "target": target[part]} for part in (slice(2), slice(2, 4))]
        expected, gradients, _, buffers = reference(spec, before, parts)

        assert seen == {0: spec.orders[0], 1: spec.orders[1]}
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for name, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=0)
        for name, buffer in pipe.named_buffers():
            assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize(
    ("schedule", "devices", "placement"),
    [
        ("gpipe", None, (0, 1, 2, 3)),
        ("1f1b", 2, (0, 0, 1, 1)),
        ("interleaved", None, (0, 1, 0, 1)),
        ("zbv", 2, (0, 1, 1, 0)),
        ("zb-h1", 1, (0, 0, 0, 0)),
    ],
)
def test_a_package_runs_in_other_schedules(schedule, devices, placement):
    """Than the one it was compiled for."""
    x, target = stateful_data(4)
    where = None if devices is None else ["cpu"] * devices
    with Pipeline(planned_zbv(), None) as pipe:
        expected = pipe.step((x,), target)
    with Pipeline(planned_zbv(), None, schedule=schedule, devices=where) as pipe:
        assert pipe.placement == placement
        torch.testing.assert_close(pipe.step((x,), target), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "schedule", "devices", "possible"),
    [
        (skip_spec, "zbv", 4, "2"),
        (skip_spec, "interleaved", 4, "1 or 2"),
        (skip_spec, "gpipe", 3, "1, 2 or 4"),
        (planned_zbv, "zbv", 1, "2"),
    ],
)
def test_stages_that_do_not_fit(spec, schedule, devices, possible):
    """The way out is named."""
    with pytest.raises(UsageError) as raised:
        Pipeline(spec(), None, schedule=schedule, devices=["cpu"] * devices)
    fault, hint = str(raised.value).splitlines()
    assert f"over {devices} devices or processes by the schedule {schedule}" in fault
    assert f"use {possible}, or another --schedule" in hint


def test_schedules_that_cannot_have_the_stages():
    """An odd number of them cannot be dealt in twos."""
    spec = skip_spec()
    three = dataclasses.replace(
        SPECS["tied"](),
        stages=tied_spec().stages[:3],
    )
    for schedule in ("zbv", "interleaved"):
        with pytest.raises(UsageError, match="3 stages cannot be dealt so"):
            Pipeline(three, None, schedule=schedule)
        with pytest.raises(ValueError, match="1 stage cannot be dealt so, 2 can"):
            devices_for(ScheduleKind(schedule), 1)
    with pytest.raises(UsageError, match=", ".join(kind.value for kind in ScheduleKind)):
        Pipeline(spec, None, schedule="zb-h3")


@pytest.mark.parametrize("schedule", [kind.value for kind in ScheduleKind if kind.value != "gpipe"])
def test_exact_batchnorm_is_refused_with_the_way_out(schedule):
    """Without a loss too, where stages that do not follow each other would run in training mode."""
    expected = f"exact BatchNorm does not go with the schedule {schedule}"
    with pytest.raises(UsageError, match=expected):
        Pipeline(joint_spec(), None, schedule=schedule, batchnorm="exact")
    silent = dataclasses.replace(joint_spec(), loss=None)
    with Pipeline(silent, None, schedule=schedule, batchnorm="exact") as pipe:
        pipe.train()
        inputs, _ = joint_data(8)
        if devices_for(ScheduleKind(schedule), 4) == 4:
            assert pipe(inputs) is not None
        else:
            with pytest.raises(UsageError, match=expected):
                pipe(inputs)


def bits(spec, call, **choices):
    """Losses, gradients and state after two steps."""
    with Pipeline(spec, None, **choices) as pipe:
        losses = [pipe.step(*call) for _ in range(2)]
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        return losses, gradients, snapshot(pipe)


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("devices", [1, 4])
def test_two_parts_change_no_bit(devices, precision, remat):
    """ZB-H1 takes the micro-batches in 1F1B's order; in 16 bits weights are cast once a run."""
    inputs, target, _ = data_for("skip", SAMPLES)
    spec = skip_spec(microbatches=MICROBATCHES)
    more = {"devices": ["cpu"] * devices, "precision": precision, "remat": remat}
    one, other = (bits(spec, (inputs, target), schedule=s, **more) for s in ("1f1b", "zb-h1"))
    assert torch.equal(torch.stack(one[0]), torch.stack(other[0]))
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        for name, tensor in mine.items():
            assert tensor.abs().sum() > 0
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("batchnorm", ["micro", "deferred"])
@pytest.mark.parametrize("remat", list(Remat))
def test_statistics_change_no_bit(batchnorm, remat):
    """What autograd keeps of running statistics is of its own forward, until the second part."""
    x, target = data(4 * MICROBATCHES)
    spec = net_spec(microbatches=MICROBATCHES)
    more = {"batchnorm": batchnorm, "remat": remat}
    one, other = (bits(spec, ((x,), target), schedule=s, **more) for s in ("1f1b", "zb-h1"))
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("schedule", SPLIT)
def test_accumulated_clipped_and_hooked(schedule):
    """As in the plain loop: a hook sees gradients of mini-batches, clipping that of the step."""
    spec = tied_spec(microbatches=MICROBATCHES)
    found = []
    for kind in ("1f1b", schedule):
        calls = []
        with Pipeline(spec, None, schedule=kind) as pipe:
            hooked = dict(pipe.named_parameters())["l1.weight"]
            hooked.register_hook(lambda g, calls=calls: calls.append(1) or g * 2)
            for seed in range(3):
                pipe.step(*data_for("tied", SAMPLES, seed=seed)[:2], weight=1 / 3)
            norm = pipe.clip_grad_norm_(0.01)
            gradients = {name: p.grad for name, p in pipe.named_parameters()}
            found.append((norm, gradients))
        assert len(calls) == 3
    torch.testing.assert_close(found[0], found[1])
    total = torch.cat([gradient.flatten() for gradient in found[1][1].values()]).norm()
    torch.testing.assert_close(total, torch.tensor(0.01))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_checkpoints_go_from_placement_to_placement(schedule, tmp_path):
    """Weights, moments and buffers, to any number of devices and back."""

    def run(kind, path=None, steps=3):
        with Pipeline(stateful_spec(microbatches=MICROBATCHES), None, schedule=kind) as pipe:
            optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
            if path is not None:
                load_checkpoint(pipe, optimizer, path)
            for _ in range(steps):
                optimizer.zero_grad()
                x, target = stateful_data(SAMPLES, seed=pipe.step_number)
                pipe.step((x,), target)
                optimizer.step()
            saved = save_checkpoint(pipe, optimizer, tmp_path, Progress(step=pipe.step_number))
            return saved, snapshot(pipe)

    _, expected = run("1f1b", steps=6)
    path, _ = run(schedule)
    path, _ = run("gpipe", path, steps=1)
    _, found = run(schedule, path, steps=2)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
