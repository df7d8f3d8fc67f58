"""Times the stages of a pipeline while its engines run whole steps."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..core.engine import DeviceResult, Engine
from ..core.pipeline import Pipeline
from ..core.ranks import together
from ..core.request import StepRequest
from ..core.transport import Endpoint
from ..core.wiring import ActionStep, StageWiring
from ..schedule.actions import Compute, Phase, Transfer

WARM_UP = 3
"""Steps that do not count."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage, beside whatever other devices do meanwhile.

    Attributes:
        backward_s: with the forward that is run again; where the schedule splits the backward,
            its first part.
        weight_s: the second part, where there is one.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0


def measure_stages(pipe: Pipeline, step: Callable[[], None], steps: int) -> list[StageSeconds]:
    """The stages of a pipeline; every rank calls it and gets all of them.

    Args:
        steps: of which the medians are taken.
    """
    execution = pipe.execution
    own = execution.engines
    engines = [_TimedEngine(engine) for engine in own]
    execution.engines = engines
    try:
        for turn in range(WARM_UP + steps):
            if turn == WARM_UP:
                for engine in engines:
                    engine.seconds.clear()
            step()
    finally:
        execution.engines = own
    mine = {stage: times for engine in engines for stage, times in engine.stages().items()}

    def joined(parts: Sequence[Mapping[int, StageSeconds]]) -> list[StageSeconds]:
        found = {stage: seconds for part in parts for stage, seconds in part.items()}
        return [found[stage] for stage in sorted(found)]

    return together(pipe.world, "measured times", lambda: mine, joined)


class _TimedEngine(Engine):
    """An engine that notes how long each micro-batch is in a stage, waiting left out."""

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self.seconds: dict[tuple[int, Phase], list[float]] = defaultdict(list)

    def run(
        self,
        steps: Sequence[ActionStep],
        wiring: Sequence[StageWiring],
        request: StepRequest,
        endpoint: Endpoint,
        ended: Callable[[int], None] | None = None,
    ) -> DeviceResult:
        waits = _Waits(endpoint, self.device)
        timed = _TimedProgram(steps, waits)
        found = super().run(timed, wiring, request, waits, ended)
        for step, seconds in zip(steps, timed.seconds, strict=True):
            if isinstance(step.action, Compute):
                # A joint stage takes all micro-batches at once.
                joint = wiring[step.action.stage].joint is not None
                share = seconds / (request.microbatches if joint else 1)
                self.seconds[step.action.stage, step.action.phase].append(share)
        return found

    def stages(self) -> dict[int, StageSeconds]:
        medians = {key: statistics.median(each) for key, each in self.seconds.items()}
        phases = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT
        return {
            stage: StageSeconds(*(medians.get((stage, phase), 0.0) for phase in phases))
            for stage in self.modules
        }


class _Waits:
    """An endpoint that counts the seconds in which a device waits for values."""

    def __init__(self, endpoint: Endpoint, device: torch.device) -> None:
        self.seconds = 0.0
        self.device = device
        self.send, self.expect = endpoint.send, endpoint.expect
        self.exchange, self.flush = endpoint.exchange, endpoint.flush
        self._take = endpoint.take

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        self.settle()
        start = time.perf_counter()
        tensor = self._take(transfer)
        self.settle()
        self.seconds += time.perf_counter() - start
        return tensor

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _TimedProgram(list[ActionStep]):
    """A program that notes the seconds at each of its steps, without those of waiting."""

    def __init__(self, steps: Sequence[ActionStep], waits: _Waits) -> None:
        super().__init__(steps)
        self._waits = waits
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[ActionStep]:
        self.seconds = []
        for step in super().__iter__():
            start, waited = time.perf_counter(), self._waits.seconds
            yield step
            self._waits.settle()
            waited = self._waits.seconds - waited
            self.seconds.append(time.perf_counter() - start - waited)
