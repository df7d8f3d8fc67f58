"""An engine that times its steps, and can make a run again without waiting for other devices."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from ..core.engine import DeviceResult, Engine
from ..core.request import StepRequest
from ..core.transport import Endpoint
from ..core.wiring import ActionStep, StageWiring
from ..schedule.actions import Compute, Phase, SharedSum, Transfer
from ..spec import Remat
from .stage_times import StageSeconds


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Handling(Enum):
    """What a device does with a message: TAKE one that is there, or WAIT for it."""

    SEND = "send"
    EXPECT = "expect"
    TAKE = "take"
    WAIT = "wait"


class MessageEvent(NamedTuple):
    """A device has handled a message, from `start` to `end` by the clock of its host."""

    handling: Handling
    transfer: Transfer
    start: float
    end: float


class _Recorder:
    """An endpoint that keeps what arrives, and notes when messages are handled."""

    def __init__(
        self,
        endpoint: Endpoint,
        device: torch.device,
        record: dict[Transfer, torch.Tensor | None],
        events: list[MessageEvent],
    ) -> None:
        self._record = record
        self._endpoint = endpoint
        self._device = device
        self._events = events
        self.here, self.flush = endpoint.here, endpoint.flush
        self.sum_s: float | None = None

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        settle(self._device)  # its way begins when what is sent is there
        with self._noted(Handling.SEND, transfer):
            self._endpoint.send(transfer, tensor)

    def expect(self, transfer: Transfer) -> None:
        with self._noted(Handling.EXPECT, transfer):
            self._endpoint.expect(transfer)

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        handling = Handling.TAKE if self._endpoint.here(transfer) else Handling.WAIT
        with self._noted(handling, transfer):
            self._record[transfer] = tensor = self._endpoint.take(transfer)
            settle(self._device)
        return tensor

    def exchange(self, total: SharedSum) -> None:
        start = time.perf_counter()
        self._endpoint.exchange(total)
        self.sum_s = (self.sum_s or 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def _noted(self, handling: Handling, transfer: Transfer) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._events.append(MessageEvent(handling, transfer, start, time.perf_counter()))


class _Replay:
    """An endpoint on which everything has arrived, and nothing leaves."""

    def __init__(self, record: Mapping[Transfer, torch.Tensor | None]) -> None:
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


class TimedSteps(list[ActionStep]):
    """A program that notes how long the engine is at each of its steps, and at all of them.

    Args:
        apart: whether the device is to be done with a step before it begins the next.

    Attributes:
        seconds: at each step.
        middles: halfway through each, by the clock.
        begun, ended: from when until when the device was at work, by the clock.
    """

    def __init__(self, steps: Sequence[ActionStep], device: torch.device, *, apart: bool) -> None:
        super().__init__(steps)
        self._device = device
        self._apart = apart
        self.seconds: list[float] = []
        self.middles: list[float] = []
        self.begun = self.ended = 0.0

    def __iter__(self) -> Iterator[ActionStep]:
        self.begun = time.perf_counter()
        for step in super().__iter__():
            start = time.perf_counter()
            yield step
            if self._apart:
                settle(self._device)
            end = time.perf_counter()
            self.seconds.append(end - start)
            self.middles.append((start + end) / 2)
        settle(self._device)
        self.ended = time.perf_counter()


class Turn(Enum):
    """What a device does in a step."""

    WAITING = "its work, as in training"
    BESIDE_OTHERS = "its work, on what it received once, while the others do theirs"
    ALONE = "the same while the others rest"
    RESTING = "nothing"


class WatchedEngine(Engine):
    """An engine that, once it has seen a real run, can make it again without waiting."""

    def __init__(self, engine: Engine, events: list[MessageEvent]) -> None:
        vars(self).update(vars(engine))
        self._events = events
        self.turn = Turn.WAITING
        self.asked: tuple[Sequence[ActionStep], Sequence[StageWiring], StepRequest] | None = None
        self.rounds: dict[Turn, list[TimedSteps]] = {turn: [] for turn in Turn}
        self.sums_s: list[float] = []
        self.last = TimedSteps((), self.device, apart=False)
        self._record: dict[Transfer, torch.Tensor | None] = {}
        self._outcome = DeviceResult()

    def run(
        self,
        steps: Sequence[ActionStep],
        wiring: Sequence[StageWiring],
        request: StepRequest,
        endpoint: Endpoint,
        ended: Callable[[int], None] | None = None,
    ) -> DeviceResult:
        """As this turn has it; see `Engine.run`."""
        if self.turn is Turn.RESTING:
            return self._outcome
        if self.turn is Turn.WAITING:
            self.asked = steps, wiring, request
            recorder = _Recorder(endpoint, self.device, self._record, self._events)
            self.last = TimedSteps(steps, self.device, apart=False)
            self._outcome = super().run(self.last, wiring, request, recorder, ended)
            if recorder.sum_s is not None:
                self.sums_s.append(recorder.sum_s)
            return self._outcome
        self.last = TimedSteps(steps, self.device, apart=True)
        outcome = super().run(self.last, wiring, request, _Replay(self._record))
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
        _, wiring, request = self.asked
        found: dict[int, dict[str, float]] = {stage: {"forward_s": 0.0} for stage in self.modules}
        for (stage, name), places in self._places().items():
            every, counted = [], []
            for run, (begin, end) in zip(self.rounds[turn], during, strict=True):
                every.append(statistics.fmean(run.seconds[place] for place in places))
                inside = [run.seconds[p] for p in places if begin <= run.middles[p] <= end]
                counted += [statistics.fmean(inside)] if inside else []
            # A joint stage takes all micro-batches at once.
            share = 1 if wiring[stage].joint is None else request.microbatches
            found[stage][name] = statistics.median(counted or every) / share
        return {stage: StageSeconds(**times) for stage, times in found.items()}

    def _places(self) -> dict[tuple[int, str], list[int]]:
        """By stage and field of `StageSeconds`, where in the program that work is."""
        assert self.asked is not None
        again = {
            (step.action.stage, step.action.microbatch)
            for step in self.asked[0]
            if isinstance(step.action, Compute)
            and step.waits
            and self.options.remat[step.action.stage] is Remat.FULL
        }
        names = {Phase.FORWARD: "forward_s", Phase.BACKWARD: "backward_s", Phase.WEIGHT: "weight_s"}
        found: dict[tuple[int, str], list[int]] = defaultdict(list)
        for place, step in enumerate(self.asked[0]):
            action = step.action
            if isinstance(action, Compute):
                key = action.stage, action.microbatch
                recomputes = action.phase is Phase.BACKWARD and key in again
                found[action.stage, "again_s" if recomputes else names[action.phase]].append(place)
        return found
