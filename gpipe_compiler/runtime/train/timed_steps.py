"""When a device is at which step of its program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from typing import overload

import torch

from ..core.wiring import Step


class TimedSteps(Sequence[Step]):
    """A program that notes how long the engine is at each of its steps, and at all of them.

    Args:
        apart: whether the device is to be done with a step before it begins the next.

    Attributes:
        seconds: at each step.
        middles: halfway through each, by the clock.
        begun, ended: from when until when the device was at work, by the clock.
    """

    def __init__(self, steps: Sequence[Step], device: torch.device, *, apart: bool) -> None:
        self._steps = steps
        self._device = device
        self._apart = apart
        self.seconds: list[float] = []
        self.middles: list[float] = []
        self.begun = self.ended = 0.0

    def __iter__(self) -> Iterator[Step]:
        self.begun = time.perf_counter()
        for step in self._steps:
            start = time.perf_counter()
            yield step
            if self._apart:
                settle(self._device)
            end = time.perf_counter()
            self.seconds.append(end - start)
            self.middles.append((start + end) / 2)
        settle(self._device)
        self.ended = time.perf_counter()

    def mean(self, places: Collection[int]) -> float:
        """Seconds at the steps in these places, on average."""
        return statistics.fmean(self.seconds[place] for place in places)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        return self._steps[index]


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
