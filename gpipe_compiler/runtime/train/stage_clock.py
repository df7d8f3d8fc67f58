"""How long the stages take: each by itself, and all of them side by side.

Stages run here as they do in training: in whole steps, by the engine, in the order of the schedule,
in threads or in processes of their own. But nobody waits for anybody: what comes from another
device was kept from a real step. What is left is what a simulation of the schedule starts from.
Between these steps come others as in training, which show what messages cost.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, astuple
from enum import Enum
from typing import NamedTuple

import torch

from ..core.engine import Engine, Outcome
from ..core.job import Job
from ..core.pipeline import Pipeline
from ..core.runners import DistributedRunner
from ..core.transport import Endpoint
from ..core.wiring import StageWiring, Step
from ..schedule.actions import Compute, Phase, SharedSum, Transfer
from ..spec import Remat
from .clocked import Clocked, StageSeconds
from .stage_links import LinkSeconds, link_seconds
from .stage_messages import MessageTimes
from .timed_steps import TimedSteps

PHASE_S = 0.4
"""Seconds, about, for which each device is timed alone, and as long all side by side.

They take turns, step by step: the speed of a machine may change.
"""

LEAST_ROUNDS = 3
"""Steps in that time at least, however long they take."""


def clock(pipe: Pipeline, inputs: object, target: object, phase_s: float = PHASE_S) -> Clocked:
    """Time the stages of a pipeline on one mini-batch; every rank calls it and gets all times.

    Gradients are lost; weights stay as they are, running statistics do not.

    Args:
        inputs, target: as `Pipeline.step` takes them.
        phase_s: seconds, about, to spend on each device alone, and on all together.
    """
    return _Clock(pipe, inputs, target).measure(phase_s)


class _Recorder:
    """An endpoint that keeps what arrives, and notes what messages cost."""

    def __init__(
        self,
        endpoint: Endpoint,
        record: dict[Transfer, torch.Tensor | None],
        messages: MessageTimes,
    ) -> None:
        self._record = record
        self._endpoint = endpoint
        self._messages = messages
        self.here, self.flush = endpoint.here, endpoint.flush
        self.sum_s: float | None = None

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        with self._messages.sending(transfer):
            self._endpoint.send(transfer, tensor)

    def expect(self, transfer: Transfer) -> None:
        with self._messages.expecting(transfer):
            self._endpoint.expect(transfer)

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        with self._messages.taking(transfer, here=self._endpoint.here(transfer)):
            self._record[transfer] = tensor = self._endpoint.take(transfer)
        return tensor

    def exchange(self, total: SharedSum) -> None:
        start = time.perf_counter()
        self._endpoint.exchange(total)
        self.sum_s = (self.sum_s or 0.0) + time.perf_counter() - start


class _Replay:
    """An endpoint on which everything has arrived, and nothing leaves."""

    def __init__(self, record: dict[Transfer, torch.Tensor | None]) -> None:
        self._record = record

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        """Nowhere."""

    def expect(self, transfer: Transfer) -> None:
        """It is here."""

    def here(self, transfer: Transfer) -> bool:
        return True

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        return self._record[transfer]

    def exchange(self, total: SharedSum) -> None:
        """With nobody."""

    def flush(self) -> None:
        """Nothing is under way."""


class Turn(Enum):
    """What a device does in a step."""

    WAITING = "its work, as in training"
    BESIDE_OTHERS = "its work, on what it received once, while the others do theirs"
    ALONE = "the same while the others rest"
    RESTING = "nothing"


class _Watched(Engine):
    """An engine that, once it has seen a real run, can make it again without waiting."""

    def __init__(self, engine: Engine, messages: MessageTimes) -> None:
        vars(self).update(vars(engine))
        self._messages = messages
        self.turn = Turn.WAITING
        self.asked: tuple[Sequence[Step], Sequence[StageWiring], Job] | None = None
        self.rounds: dict[Turn, list[TimedSteps]] = {turn: [] for turn in Turn}
        self.sums_s: list[float] = []
        self.last = TimedSteps((), self.device, apart=False)
        self._record: dict[Transfer, torch.Tensor | None] = {}
        self._outcome = Outcome()

    def run(
        self,
        steps: Sequence[Step],
        wiring: Sequence[StageWiring],
        job: Job,
        endpoint: Endpoint,
        ended: Callable[[int], None] | None = None,
    ) -> Outcome:
        if self.turn is Turn.RESTING:
            return self._outcome
        if self.turn is Turn.WAITING:
            self.asked = steps, wiring, job
            recorder = _Recorder(endpoint, self._record, self._messages)
            self.last = TimedSteps(steps, self.device, apart=False)
            self._outcome = super().run(self.last, wiring, job, recorder, ended)
            if recorder.sum_s is not None:
                self.sums_s.append(recorder.sum_s)
            return self._outcome
        self.last = TimedSteps(steps, self.device, apart=True)
        outcome = super().run(self.last, wiring, job, _Replay(self._record))
        self.rounds[self.turn].append(self.last)
        return outcome

    def stage_seconds(
        self, turn: Turn, during: Sequence[tuple[float, float]]
    ) -> dict[int, StageSeconds]:
        """The medians over all runs of a kind.

        Args:
            during: of each run, from when until when its work counts, as long as there is any.
        """
        assert self.asked is not None
        steps, _, job = self.asked
        again = {
            (step.action.stage, step.action.microbatch)
            for step in steps
            if isinstance(step.action, Compute)
            and step.waits
            and self.manner.remat[step.action.stage] is Remat.FULL
        }
        found: dict[int, dict[str, float]] = {stage: {"forward_s": 0.0} for stage in self.modules}
        for (stage, name), places in _places(steps, again).items():
            every = [run.mean(places) for run in self.rounds[turn]]
            counted = [
                run.mean(inside)
                for run, (begin, end) in zip(self.rounds[turn], during, strict=True)
                if (inside := [place for place in places if begin <= run.middles[place] <= end])
            ]
            seconds = statistics.median(counted or every)
            found[stage][name] = seconds / (1 if self._apart(stage) else job.microbatches)
        return {stage: StageSeconds(**times) for stage, times in found.items()}

    def _apart(self, stage: int) -> bool:
        """Whether a stage takes micro-batches one by one."""
        assert self.asked is not None
        return self.asked[1][stage].joint is None


def _places(
    steps: Sequence[Step], again: Collection[tuple[int, int]]
) -> dict[tuple[int, str], list[int]]:
    """By stage and field of `StageSeconds`, where in a program that work is.

    Args:
        again: the backwards, by stage and micro-batch, that run the forward again.
    """
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    names = {Phase.FORWARD: "forward_s", Phase.BACKWARD: "backward_s", Phase.WEIGHT: "weight_s"}
    for place, step in enumerate(steps):
        action = step.action
        if isinstance(action, Compute):
            recomputes = action.phase is Phase.BACKWARD and (
                (action.stage, action.microbatch) in again
            )
            found[action.stage, "again_s" if recomputes else names[action.phase]].append(place)
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
        self.engines: list[_Watched] = []
        self.messages = MessageTimes()

    def measure(self, phase_s: float) -> Clocked:
        runner = self.pipe.runner
        own = runner.engines
        self.engines = [_Watched(engine, self.messages) for engine in own]
        runner.engines = self.engines
        try:
            for _ in range(1 + LEAST_ROUNDS):
                self._step()
            sums_s = self._sums()
            self.messages.clear()
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
            together = self._found(Turn.BESIDE_OTHERS)
            alone = self._found(Turn.ALONE) if len(devices) > 1 else together
        finally:
            runner.engines = own
        links = self._links()
        return Clocked(
            _with_transfers(alone, links),
            _with_transfers(together, links),
            links.receive_s,
            links.gradient_s,
            around_s + sums_s,
        )

    def _links(self) -> LinkSeconds:
        """What messages cost, as the rank where it costs most has found it."""
        found = astuple(link_seconds(self.pipe, self.messages))
        flat = iter(self._agreed([seconds for row in found for seconds in row], max))
        return LinkSeconds(*(tuple(next(flat) for _ in row) for row in found))

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

    def _place(self, engine: _Watched) -> int:
        """The device of an engine."""
        return self.pipe.placement[min(engine.modules)]

    def _sums(self) -> float:
        """Seconds in which processes add up shared gradients, on the one that comes last."""
        found = [statistics.median(e.sums_s[1:]) for e in self.engines if e.sums_s]
        (least,) = self._agreed([min(found, default=math.inf)], min)
        return least if math.isfinite(least) else 0.0

    def _turn(self, engine: _Watched, devices: Collection[int]) -> Turn:
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
        table = [[0.0] * 4 for _ in self.pipe.placement]
        for engine in self.engines:
            for stage, found in engine.stage_seconds(turn, during).items():
                table[stage] = list(asdict(found).values())
        flat = self._agreed([number for row in table for number in row], max)
        return [StageSeconds(*flat[4 * stage : 4 * stage + 4]) for stage in range(len(table))]

    def _agreed(self, numbers: list[float], choose: Callable[[list[float]], float]) -> list[float]:
        """The largest or smallest over all ranks, which all wait here for one another."""
        runner = self.pipe.runner
        if not isinstance(runner, DistributedRunner):
            return numbers
        row = torch.tensor(numbers, dtype=torch.float64, device=runner.network.device)
        rows = [each.tolist() for each in runner.network.gathered(row, "measured times")]
        return [choose([row[i] for row in rows]) for i in range(len(numbers))]


def _with_transfers(stages: Sequence[StageSeconds], links: LinkSeconds) -> tuple[StageSeconds, ...]:
    """The times of stages whose devices handle what crosses."""
    return tuple(
        StageSeconds(
            stage.forward_s + forward_s,
            stage.backward_s + backward_s if stage.backward_s else 0.0,
            stage.weight_s,
            stage.again_s + backward_s if stage.again_s else 0.0,
        )
        for stage, forward_s, backward_s in zip(
            stages, links.forward_s, links.backward_s, strict=True
        )
    )
