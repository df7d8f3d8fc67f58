"""The times of stages, against stages that work for known times."""

from __future__ import annotations

import pytest
import torch
from tiny_pipelines import SAMPLES, data_for, skip_spec

from gpipe_compiler.runtime.core.engine import EngineRun
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.spec import Remat, ScheduleKind
from gpipe_compiler.runtime.train import stage_times
from gpipe_compiler.runtime.train.stage_times import StageSeconds, measure_stages
from gpipe_compiler.runtime.train.told import stage_table

FORWARD_S, BACKWARD_S = 0.003, 0.006


class _Clock:
    """A clock that only work moves on: exact, for as long as one thread works."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def slow(pipe: Pipeline, clock: _Clock) -> Pipeline:
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


def steps_of(pipe: Pipeline):
    inputs, target, _ = data_for("skip", 4 * SAMPLES)

    def step() -> None:
        pipe.zero_grad()
        pipe.step(inputs, target).item()

    return step


@pytest.mark.parametrize("schedule", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize("remat", list(Remat))
def test_a_device_of_all_stages_takes_what_they_take(monkeypatch, schedule, remat):
    """Where all stages share a device, only GPipe's last micro-batch need not be run again."""
    work = _Clock()
    monkeypatch.setattr(stage_times, "time", work)
    with slow(
        Pipeline(skip_spec(), None, devices="cpu", schedule=schedule, remat=remat), work
    ) as pipe:
        found = measure_stages(pipe, steps_of(pipe), 2)

    again = schedule is ScheduleKind.GPIPE and remat is Remat.FULL
    for number, seconds in enumerate(found):
        forward_s, backward_s = FORWARD_S * (number + 1), BACKWARD_S * (number + 1)
        assert seconds.forward_s == pytest.approx(forward_s)
        assert seconds.backward_s == pytest.approx(backward_s + again * forward_s)
        assert seconds.weight_s == 0


def test_waiting_is_no_work(monkeypatch):
    work = _Clock()
    monkeypatch.setattr(stage_times, "time", work)
    with slow(Pipeline(skip_spec(), None, devices="cpu"), work) as pipe:

        def received(self, need, microbatch, plain=EngineRun._received):
            self.take(None)
            return plain(self, need, microbatch)

        monkeypatch.setattr(EngineRun, "_received", received)
        monkeypatch.setattr(EngineRun, "take", lambda self, transfer: work.sleep(10.0))
        found = measure_stages(pipe, steps_of(pipe), 2)

    assert [seconds.forward_s for seconds in found] == pytest.approx(
        [FORWARD_S * (number + 1) for number in range(len(found))]
    )


def test_timing_leaves_weights_and_later_steps_as_they_are(one_thread):
    inputs, target, _ = data_for("skip", 4 * SAMPLES)
    with Pipeline(skip_spec(), None, seed=3) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.zero_grad()
        loss = pipe.step(inputs, target)
        gradients = [p.grad.clone() for p in pipe.parameters()]

        measure_stages(pipe, steps_of(pipe), 1)

        assert all(torch.equal(before[name], t) for name, t in pipe.state_dict().items())
        pipe.zero_grad()
        assert torch.equal(loss, pipe.step(inputs, target))
        assert all(map(torch.equal, gradients, (p.grad for p in pipe.parameters())))


def test_the_table_leaves_out_what_is_not_there():
    table = stage_table([StageSeconds(0.001, 0.002), StageSeconds(0.003, 0.004, 0.005)])

    assert table.splitlines() == [
        "stage  forward ms  backward ms  weight ms",
        "    0           1            2",
        "    1           3            4          5",
    ]
