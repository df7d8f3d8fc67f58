"""Times the stages of a pipeline while its engines run whole steps."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.engine import EngineRun
from ..core.pipeline import Pipeline
from ..core.ranks import together
from ..core.wiring import ActionStep
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


Seconds = defaultdict[tuple[int, Phase], list[float]]
"""Of each micro-batch in a stage, by its phase."""


def measure_stages(pipe: Pipeline, step: Callable[[], None], steps: int) -> list[StageSeconds]:
    """The stages of a pipeline; every rank calls it and gets all of them.

    Args:
        steps: of which the medians are taken.
    """
    seconds: Seconds = defaultdict(list)
    engines = pipe.execution.engines
    for engine in engines:
        engine.run_class = functools.partial(_TimedRun, seconds)
    try:
        for turn in range(WARM_UP + steps):
            if turn == WARM_UP:
                seconds.clear()
            step()
    finally:
        for engine in engines:
            engine.run_class = EngineRun
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    phases = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT
    mine = {
        stage: StageSeconds(*(medians.get((stage, phase), 0.0) for phase in phases))
        for stage in pipe.stages
    }

    def joined(parts: Sequence[Mapping[int, StageSeconds]]) -> list[StageSeconds]:
        found = {stage: seconds for part in parts for stage, seconds in part.items()}
        return [found[stage] for stage in sorted(found)]

    return together(pipe.world, "measured times", lambda: mine, joined)


class _TimedRun(EngineRun):
    """A run that notes how long each micro-batch is in a stage, waiting left out."""

    def __init__(self, seconds: Seconds, *args: Any) -> None:
        super().__init__(*args)
        self._seconds = seconds
        self._waited = 0.0

    def execute(self, step: ActionStep) -> None:
        start, self._waited = time.perf_counter(), 0.0
        super().execute(step)
        self._settle()
        action = step.action
        if isinstance(action, Compute):
            # A joint stage takes all micro-batches at once.
            joint = self.wiring[action.stage].joint is not None
            share = self.request.microbatches if joint else 1
            spent = time.perf_counter() - start - self._waited
            self._seconds[action.stage, action.phase].append(spent / share)

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        self._settle()
        start = time.perf_counter()
        tensor = super().take(transfer)
        self._settle()
        self._waited += time.perf_counter() - start
        return tensor

    def _settle(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
