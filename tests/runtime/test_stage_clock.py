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

from gpipe_compiler.runtime.core.choices import Manner
from gpipe_compiler.runtime.core.engine import Engine
from gpipe_compiler.runtime.core.local import LocalEndpoint
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.wiring import Step
from gpipe_compiler.runtime.schedule.actions import Compute, Phase, Transfer
from gpipe_compiler.runtime.spec import BatchNorm, Crossing, Precision, Remat, ScheduleKind
from gpipe_compiler.runtime.train import stage_clock, stage_links, stage_messages, timed_steps
from gpipe_compiler.runtime.train.clocked import Clocked, StageSeconds
from gpipe_compiler.runtime.train.stage_clock import Turn, clock
from gpipe_compiler.runtime.train.stage_messages import MessageSeconds, MessageTimes

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
    monkeypatch.setattr(timed_steps, "time", work)
    inputs, target, _ = data_for("skip", 4 * SAMPLES)
    with slow(
        Pipeline(skip_spec(), None, devices="cpu", schedule=schedule, remat=remat), work
    ) as p:
        monkeypatch.setattr(p, "zero_grad", lambda: work.sleep(0.25))
        found = clock(p, inputs, target, phase_s=0.05)

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
        found = clock(pipe, inputs, target, phase_s=0.05)

    for times in (found.alone, found.together):
        for number, seconds in enumerate(times):
            assert seconds.forward_s >= FORWARD_S * (number + 1)
            assert seconds.backward_s >= BACKWARD_S * (number + 1)
    assert found.receive_s[0] == found.gradient_s[0] == 0.0


def test_what_a_device_does_after_the_others_is_not_beside_them():
    """Of three steps of 1, 2 and 3 s the others end in the second one's second half."""
    manner = Manner(BatchNorm.MICRO, Precision.FP32, (Remat.NONE,))
    plain = Engine({0: nn.Identity()}, torch.device("cpu"), None, manner)
    engine = stage_clock._Watched(plain, MessageTimes())
    steps = [Step(Compute(0, Phase.FORWARD, microbatch), ()) for microbatch in range(3)]
    engine.asked = steps, [SimpleNamespace(joint=None)], None
    run = timed_steps.TimedSteps(steps, torch.device("cpu"), apart=True)
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
        clock(pipe, inputs, target, phase_s=0.01)

        assert all(torch.equal(before[n], tensor) for n, tensor in pipe.state_dict().items())
        pipe.zero_grad()
        assert torch.equal(loss, pipe.step(inputs, target))
        assert all(map(torch.equal, gradients, (p.grad for p in pipe.parameters())))


def test_measurements_are_kept_in_a_file(tmp_path):
    seconds = StageSeconds(1.0, 2.0, 3.0, 4.0)
    found = Clocked((seconds,), (dataclasses.replace(seconds, weight_s=9.0),), (1.5,), (2.5,), 0.25)
    found.write(tmp_path / "clock.json")

    assert Clocked.read(tmp_path / "clock.json") == found


class _Channel:
    """A network of two ranks that notes what is started on it, in order."""

    carrier = device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.started: list[tuple[int, int]] = []

    def send(self, tensor, rank, tag):
        self.started.append((self.rank, rank))

    def receive(self, buffer, rank, tag):
        self.started.append((rank, self.rank))

    def finish(self, started, what):
        """At once."""

    def broadcast(self, tensor, source, what):
        return tensor


def test_both_ends_of_a_link_start_messages_in_one_order():
    """NCCL takes those of two ranks one after the other, either way: another order hangs."""
    crossing = Crossing("x", 0, (1,), (2, 4), torch.float32, gradient=True)
    ends = [_Channel(0), _Channel(1)]
    for end in ends:
        exchange = stage_links._Exchange(crossing, target=1, size=2)
        stage_links._between_processes(end, placement=(1, 0), exchange=exchange, ends=(1, 0))
    first, second = (end.started for end in ends)
    assert first == second
    assert {(0, 1), (1, 0)} == set(first)


@pytest.mark.parametrize("late_s", [0.0, 0.004])
def test_taking_what_is_there_is_no_way(late_s):
    """To and fro in 12 ms is 6 one way: 1 to send it, 3 to take it, so 2 under way, or none."""
    exchange = stage_links._Exchange(
        Crossing("x", 0, (1,), (2, 4), torch.float32, gradient=True), target=1, size=2
    )
    timer = exchange.timer
    timer._rows.update(send=[0.001] * 9, both=[0.012] * 9, expect=[0.0005] * 9)
    found = exchange.message(take_s=0.003 + late_s)
    assert found.send_s == 0.001
    assert found.expect_s == 0.0005
    assert found.take_s == 0.003 + late_s
    assert found.way_s == pytest.approx(max(0.0, 0.002 - late_s))


def test_messages_cost_what_was_seen_of_them_where_that_is_more(monkeypatch):
    """Sent at 0 for 2 ms, waited for until 9 ms; then one that lies there is taken in 3 ms."""
    work = _Clock()
    monkeypatch.setattr(stage_messages, "time", work)
    seen = MessageTimes()
    with seen.expecting(Transfer("x", 0, 0, 1)):
        work.sleep(0.001)
    for microbatch, way_s in enumerate((0.007, 0.0)):
        message = Transfer("x", microbatch, 0, 1)
        with seen.sending(message):
            work.sleep(0.002)
        with seen.taking(message, here=not way_s):
            work.sleep(way_s or 0.003)

    found = seen.at_least(MessageSeconds(0.0, 0.0, 0.0, 0.0), "x", 0, 1)
    assert dataclasses.astuple(found) == pytest.approx((0.002, 0.001, 0.004, 0.003))
    alone = MessageSeconds(0.01, 0.02, 0.03, 0.04)
    assert seen.at_least(alone, "x", 0, 1) == alone
    unseen = MessageSeconds(0.0, 0.0, 0.0, 0.0)
    assert seen.at_least(unseen, "x", 1, 0, gradient=True) == unseen


def test_what_another_process_sends_shows_no_way(monkeypatch):
    """Its clock is not this one's; only what is done here is seen."""
    work = _Clock()
    monkeypatch.setattr(stage_messages, "time", work)
    seen = MessageTimes()
    with seen.taking(Transfer("x", 0, 0, 1), here=False):
        work.sleep(0.5)
    nothing = MessageSeconds(0.0, 0.0, 0.0, 0.0)
    assert seen.at_least(nothing, "x", 0, 1) == nothing


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
