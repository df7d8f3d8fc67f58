"""The times of stages, against stages that work for known times."""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from types import SimpleNamespace

import pytest
import torch
from tiny_pipelines import SAMPLES, data_for, skip_spec
from torch import nn

from gpipe_compiler.runtime.core.engine import Engine
from gpipe_compiler.runtime.core.options import ExecutionOptions
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.transport import LocalEndpoint
from gpipe_compiler.runtime.core.wiring import ActionStep
from gpipe_compiler.runtime.schedule.actions import Compute, Phase, Transfer
from gpipe_compiler.runtime.spec import BatchNorm, Precision, Remat, ScheduleKind
from gpipe_compiler.runtime.train import stage_clock, stage_engine
from gpipe_compiler.runtime.train.stage_clock import measure_stages, message_seconds
from gpipe_compiler.runtime.train.stage_engine import Handling, MessageEvent, Turn
from gpipe_compiler.runtime.train.stage_times import MeasuredStages, StageSeconds

FORWARD_S, BACKWARD_S = 0.003, 0.006


class _Clock:
    """A clock that only work moves on: exact, for as long as one thread works."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def slow(pipe: Pipeline, clock: object) -> Pipeline:
    """The stage of number s works (s + 1) times as long as the first, in both directions."""

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            clock.sleep(FORWARD_S * factor)
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            clock.sleep(BACKWARD_S * ctx.factor)
            return gradient, None

    for number, module in pipe.stages.items():
        plain = module.forward

        def forward(*args, plain=plain, factor=number + 1):
            found = plain(*args)
            if isinstance(found, tuple):
                return (Work.apply(found[0], factor), *found[1:])
            return Work.apply(found, factor)

        module.forward = forward
    return pipe


@pytest.mark.parametrize("schedule", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize("remat", list(Remat))
def test_a_device_of_all_stages_takes_what_they_take(monkeypatch, schedule, remat):
    """Where all stages share a device, only GPipe's last micro-batch need not be run again."""
    work = _Clock()
    monkeypatch.setattr(stage_clock, "time", work)
    monkeypatch.setattr(stage_engine, "time", work)
    inputs, target, _ = data_for("skip", 4 * SAMPLES)
    with slow(
        Pipeline(skip_spec(), None, devices="cpu", schedule=schedule, remat=remat), work
    ) as p:
        monkeypatch.setattr(p, "zero_grad", lambda: work.sleep(0.25))
        found = measure_stages(p, inputs, target, phase_s=0.05)

    for number, seconds in [*enumerate(found.alone), *enumerate(found.together)]:
        forward_s, backward_s = FORWARD_S * (number + 1), BACKWARD_S * (number + 1)
        again = schedule is ScheduleKind.GPIPE and remat is Remat.FULL
        expected = forward_s, backward_s, 0.0, (forward_s + backward_s) if again else 0.0
        assert dataclasses.astuple(seconds) == pytest.approx(expected)
    assert set(found.receive_s) == set(found.gradient_s) == {0.0}
    assert found.around_s == pytest.approx(0.25)


def test_devices_are_timed_alone_and_together(one_thread):
    inputs, target, _ = data_for("skip", 4 * SAMPLES)
    with slow(Pipeline(skip_spec(), None), time) as pipe:
        found = measure_stages(pipe, inputs, target, phase_s=0.05)

    for times in (found.alone, found.together):
        for number, seconds in enumerate(times):
            assert seconds.forward_s >= FORWARD_S * (number + 1)
            assert seconds.backward_s >= BACKWARD_S * (number + 1)
    assert found.receive_s[0] == found.gradient_s[0] == 0.0


def test_what_a_device_does_after_the_others_is_not_beside_them():
    """Of three steps of 1, 2 and 3 s the others end in the second one's second half."""
    options = ExecutionOptions(BatchNorm.MICRO, Precision.FP32, (Remat.NONE,))
    plain = Engine({0: nn.Identity()}, torch.device("cpu"), None, options)
    engine = stage_engine.WatchedEngine(plain, [])
    steps = [ActionStep(Compute(0, Phase.FORWARD, microbatch), ()) for microbatch in range(3)]
    engine.asked = steps, [SimpleNamespace(joint=None)], None
    run = stage_engine.TimedSteps(steps, torch.device("cpu"), apart=True)
    run.seconds, run.middles = [1.0, 2.0, 3.0], [0.5, 2.0, 4.5]
    engine.rounds[Turn.BESIDE_OTHERS] = [run]

    def seconds(begin, end):
        return engine.stage_seconds(Turn.BESIDE_OTHERS, [(begin, end)])[0].forward_s

    assert seconds(0.0, 2.1) == 1.5
    assert seconds(-math.inf, math.inf) == 2.0
    assert seconds(7.0, 5.0) == 2.0  # by clocks that differ nothing is beside others: all counts


def test_timing_leaves_weights_and_later_steps_as_they_are(one_thread):
    inputs, target, _ = data_for("skip", 4 * SAMPLES)
    with Pipeline(skip_spec(), None, seed=3) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.zero_grad()
        loss = pipe.step(inputs, target)
        gradients = [parameter.grad.clone() for parameter in pipe.parameters()]
        measure_stages(pipe, inputs, target, phase_s=0.01)

        assert all(torch.equal(before[n], tensor) for n, tensor in pipe.state_dict().items())
        pipe.zero_grad()
        assert torch.equal(loss, pipe.step(inputs, target))
        assert all(map(torch.equal, gradients, (p.grad for p in pipe.parameters())))


def test_measurements_go_through_json():
    seconds = StageSeconds(1.0, 2.0, 3.0, 4.0)
    beside = dataclasses.replace(seconds, weight_s=9.0)
    found = MeasuredStages((seconds,), (beside,), (1.5,), (2.5,), 0.25)

    assert MeasuredStages.from_json(found.to_json()) == found


def first_process(own_start: float) -> list[MessageEvent]:
    """Sends two micro-batches in 2 ms each, the second one 10 ms after the first."""
    return [
        MessageEvent(Handling.SEND, Transfer("x", m, 0, 1), start, start + 0.002)
        for m, start in enumerate((own_start, own_start + 0.010))
    ]


def second_process() -> list[MessageEvent]:
    """Waits for the first until 9 ms, and takes the second one in 3 ms when it lies there."""
    return [
        MessageEvent(Handling.EXPECT, Transfer("x", 0, 0, 1), 0.0, 0.001),
        MessageEvent(Handling.WAIT, Transfer("x", 0, 0, 1), 0.001, 0.009),
        MessageEvent(Handling.TAKE, Transfer("x", 1, 0, 1), 0.020, 0.023),
    ]


@pytest.mark.parametrize(
    ("host", "start", "way_s"),
    [("here", 0.0, 0.009 - 0.002 - 0.003), ("there", 77.0, 0.0)],
)
def test_a_message_is_under_way_as_long_as_it_is_waited_for(host, start, way_s):
    """But for the time to send and to take it; the clock of another host says nothing."""
    found = message_seconds([("here", second_process()), (host, first_process(start))])

    assert found.keys() == {Transfer("x", 0, 0, 1)}
    assert found[Transfer("x", 0, 0, 1)] == pytest.approx((0.002, 0.001, way_s, 0.003))


def test_what_lies_there_whenever_it_is_taken_is_not_under_way():
    lying = [
        MessageEvent(Handling.TAKE, Transfer("x", m, 0, 1), 5.0 + m, 5.003 + m) for m in range(2)
    ]

    found = message_seconds([("here", first_process(0.0)), ("here", lying)])

    assert found[Transfer("x", 0, 0, 1)] == pytest.approx((0.002, 0.0, 0.0, 0.003))


def test_the_way_of_a_message_is_seen_in_a_step(one_thread, monkeypatch):
    """Whatever arrives at another thread comes so much later."""
    plain, late_s = LocalEndpoint.take, 0.03

    def late(self, transfer):
        found = plain(self, transfer)
        time.sleep(late_s)
        return found

    monkeypatch.setattr(LocalEndpoint, "take", late)
    inputs, target, _ = data_for("skip", 4 * SAMPLES)
    with Pipeline(skip_spec(), None) as pipe:
        found = measure_stages(pipe, inputs, target, phase_s=0.01)

    handled = [*found.receive_s, *(seconds.forward_s for seconds in found.together)]
    assert max(handled) >= late_s
    assert sum(found.receive_s) >= late_s / 2


def test_who_looks_whether_a_value_has_come_does_not_take_it():
    inboxes = [queue.SimpleQueue(), queue.SimpleQueue()]
    devices, placement = [torch.device("cpu")] * 2, (0, 1)
    one, other = (LocalEndpoint(index, inboxes, devices, placement) for index in range(2))
    first, second = (Transfer("x", microbatch, 0, 1) for microbatch in range(2))
    one.send(second, torch.ones(2))
    assert not other.here(first)
    assert other.here(second)
    one.send(first, None)
    assert other.here(first)
    assert other.take(first) is None
    assert torch.equal(other.take(second), torch.ones(2))
    assert not other.here(second)
