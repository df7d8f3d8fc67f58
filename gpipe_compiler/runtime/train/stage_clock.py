"""Times the stages of a pipeline: each by itself, all side by side, and the messages between them.

Stages run here as they do in training: in whole steps, by the engine, in the order of the schedule,
in threads or in processes of their own. But nobody waits for anybody: what comes from another
device was kept from a real step. What is left is what a simulation of the schedule starts from.
Between these steps come others as in training, which show what messages cost.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..core.pipeline import Pipeline
from ..core.ranks import together
from ..schedule.actions import Transfer
from .stage_engine import Handling, MessageEvent, Turn, WatchedEngine
from .stage_times import MeasuredStages, StageSeconds

PHASE_S = 0.4
"""Seconds, about, for which each device is timed alone, and as long all side by side.

They take turns, step by step: the speed of a machine may change.
"""

LEAST_ROUNDS = 3
"""Steps in that time at least, however long they take."""


def measure_stages(
    pipe: Pipeline, inputs: object, target: object, phase_s: float = PHASE_S
) -> MeasuredStages:
    """Time the stages of a pipeline on one mini-batch; every rank calls it and gets all times.

    Gradients are lost; weights stay as they are, running statistics do not.

    Args:
        inputs, target: as `Pipeline.step` takes them.
        phase_s: seconds, about, to spend on each device alone, and on all together.
    """
    return _Clock(pipe, inputs, target).measure(phase_s)


class MessageSeconds(NamedTuple):
    """Seconds of a message: to start sending it, to prepare its receipt, on its way, and to take it
    once it is there."""

    send_s: float
    expect_s: float
    way_s: float
    take_s: float


def message_seconds(
    seen: Sequence[tuple[str, Sequence[MessageEvent]]],
) -> dict[Transfer, MessageSeconds]:
    """The medians of what was seen of every message, its micro-batches taken together.

    A message is on its way until who waits for it has it. One that nobody had to wait for is on its
    way for no time, and so is one from another host, whose clock is another.

    Args:
        seen: by process its host, and all events of the same steps in order.
    """
    begun: dict[Transfer, list[tuple[str, float]]] = defaultdict(list)
    for host, events in seen:
        for event in events:
            if event.handling is Handling.SEND:
                begun[event.transfer].append((host, event.start))
    sent = {transfer: iter(starts) for transfer, starts in begun.items()}
    times: dict[Transfer, dict[Handling, list[float]]] = defaultdict(lambda: defaultdict(list))
    for host, events in seen:
        for handling, transfer, start, end in events:
            seconds = end - start
            if handling in (Handling.TAKE, Handling.WAIT):
                sender, sent_at = next(sent[transfer])
                if handling is Handling.WAIT:
                    seconds = end - sent_at if sender == host else 0.0
            times[dataclasses.replace(transfer, microbatch=0)][handling].append(seconds)
    found = {}
    for transfer, rows in times.items():
        send_s, expect_s, take_s, both_s = (
            statistics.median(rows.get(handling) or [0.0]) for handling in Handling
        )
        way_s = max(0.0, both_s - send_s - take_s)
        found[transfer] = MessageSeconds(send_s, expect_s, way_s, take_s)
    return found


class _Span(NamedTuple):
    """A step.

    Attributes:
        before_s: until the first stage's device begins, where that is of this process.
        after_s: from when the devices of this process are done.
    """

    seconds: float
    before_s: float
    after_s: float


class _Clock:
    """One measurement of a pipeline."""

    def __init__(self, pipe: Pipeline, inputs: object, target: object) -> None:
        self.pipe = pipe
        self.inputs = inputs
        self.target = target
        self.engines: list[WatchedEngine] = []
        self.events: list[MessageEvent] = []

    def measure(self, phase_s: float) -> MeasuredStages:
        execution = self.pipe.execution
        own = execution.engines
        self.engines = [WatchedEngine(engine, self.events) for engine in own]
        execution.engines = self.engines
        try:
            for _ in range(1 + LEAST_ROUNDS):
                self._step()
            sums_s = self._sums()
            self.events.clear()  # warming up is no measure
            devices = range(max(self.pipe.placement) + 1)
            (first_s,) = self._agreed([self._step(devices).seconds], max)
            for engine in self.engines:
                engine.rounds[Turn.BESIDE_OTHERS].clear()
            steps: list[_Span] = []
            for _ in range(math.ceil(max(LEAST_ROUNDS, phase_s / first_s))):
                for device in devices if len(devices) > 1 else ():
                    self._step([device])
                self._step(devices)
                steps.append(self._step())
            around_s = self._around(steps)
            beside = self._found(Turn.BESIDE_OTHERS)
            alone = self._found(Turn.ALONE) if len(devices) > 1 else beside
        finally:
            execution.engines = own
        return self._with_messages(alone, beside, around_s + sums_s)

    def _with_messages(
        self, alone: Sequence[StageSeconds], beside: Sequence[StageSeconds], around_s: float
    ) -> MeasuredStages:
        """The times of stages with what their devices do for messages, and the messages' ways."""
        seen = socket.gethostname(), self.events
        messages = together(self.pipe.world, "measured times", lambda: seen, message_seconds)
        receive_s, gradient_s, forward_s, backward_s = ([0.0] * len(alone) for _ in range(4))
        for transfer, message in messages.items():
            work_s = backward_s if transfer.gradient else forward_s
            work_s[transfer.source] += message.send_s
            work_s[transfer.target] += message.expect_s + message.take_s
            if transfer.gradient:
                gradient_s[transfer.source] += message.way_s
            else:
                receive_s[transfer.target] += message.way_s

        def loaded(stages: Sequence[StageSeconds]) -> tuple[StageSeconds, ...]:
            return tuple(
                StageSeconds(
                    seconds.forward_s + forward_s[stage],
                    seconds.backward_s + backward_s[stage] if seconds.backward_s else 0.0,
                    seconds.weight_s,
                    seconds.again_s + backward_s[stage] if seconds.again_s else 0.0,
                )
                for stage, seconds in enumerate(stages)
            )

        return MeasuredStages(
            loaded(alone), loaded(beside), tuple(receive_s), tuple(gradient_s), around_s
        )

    def _step(self, devices: Collection[int] = ()) -> _Span:
        """One step, as `bench` takes it.

        Args:
            devices: these work without waiting, and the others rest; none for training.
        """
        for engine in self.engines:
            engine.turn = self._turn(engine, devices)
        start = time.perf_counter()
        self.pipe.zero_grad()
        if self.pipe.spec.loss is None:
            self.pipe(self.inputs)
        else:
            self.pipe.step(self.inputs, self.target).item()
        end = time.perf_counter()
        first = [e for e in self.engines if self._place(e) == self.pipe.placement[0]]
        return _Span(
            end - start,
            first[0].last.begun - start if first else 0.0,
            end - max(engine.last.ended for engine in self.engines),
        )

    def _around(self, steps: Sequence[_Span]) -> float:
        """What steps take until the device of the first stage sets to work, and after the last
        device is done."""
        before = self._agreed([step.before_s for step in steps], max)
        after = self._agreed([step.after_s for step in steps], min)
        return statistics.median(before) + statistics.median(after)

    def _place(self, engine: WatchedEngine) -> int:
        """The device of an engine."""
        return self.pipe.placement[min(engine.modules)]

    def _sums(self) -> float:
        """Seconds in which processes add up shared gradients, on the one that comes last."""
        found = [statistics.median(e.sums_s[1:]) for e in self.engines if e.sums_s]
        (least,) = self._agreed([min(found, default=math.inf)], min)
        return least if math.isfinite(least) else 0.0

    def _turn(self, engine: WatchedEngine, devices: Collection[int]) -> Turn:
        if not devices:
            return Turn.WAITING
        if self._place(engine) not in devices:
            return Turn.RESTING
        whole = len(devices) > max(self.pipe.placement)
        return Turn.BESIDE_OTHERS if whole else Turn.ALONE

    def _found(self, turn: Turn) -> list[StageSeconds]:
        """Of every stage, from whichever rank has it.

        Devices do not end at once: beside others is what was done before the first one has ended.
        """
        rounds = list(zip(*(engine.rounds[turn] for engine in self.engines), strict=True))
        during = [(-math.inf, math.inf)] * len(rounds)
        if turn is Turn.BESIDE_OTHERS:
            begun = self._agreed([max(run.begun for run in runs) for runs in rounds], max)
            ended = self._agreed([min(run.ended for run in runs) for runs in rounds], min)
            during = list(zip(begun, ended, strict=True))
        own: dict[int, StageSeconds] = {}
        for engine in self.engines:
            own |= engine.stage_seconds(turn, during)

        def joined(parts: Sequence[dict[int, StageSeconds]]) -> dict[int, StageSeconds]:
            return {stage: seconds for part in parts for stage, seconds in part.items()}

        found = together(self.pipe.world, "measured times", lambda: own, joined)
        return [found[stage] for stage in sorted(found)]

    def _agreed(self, numbers: list[float], choose: Callable[[list[float]], float]) -> list[float]:
        """The largest or smallest over all ranks, which all wait here for one another."""

        def chosen(rows: Sequence[list[float]]) -> list[float]:
            return [choose(list(column)) for column in zip(*rows, strict=True)]

        return together(self.pipe.world, "measured times", lambda: numbers, chosen)
