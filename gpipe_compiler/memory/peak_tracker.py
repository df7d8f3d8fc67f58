"""The highest moments of a device while its program is played."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from gpipe_compiler.memory.job import Peak
from gpipe_compiler.memory.ref_counts import RefCounts
from gpipe_compiler.memory.script import Script
from gpipe_compiler.runtime.core.wiring import Step
from gpipe_compiler.runtime.schedule.actions import Action, Compute, SharedSum


class PeakTracker:
    """Takes note of what a ledger comes to.

    Attributes:
        position: of the step that is played.
        peak: the highest moment so far.
        stage_peaks: by stage, of what is its own.
        peaks, afters: of the steps that are points of the curve.
    """

    def __init__(self, ledger: RefCounts, stages: Iterable[int]) -> None:
        self.position = 0
        self.peak = Peak(0, "", 0, ledger.sizes)
        self.stage_peaks = dict.fromkeys(stages, 0)
        self.peaks: list[int] = []
        self.afters: list[int] = []
        self._ledger = ledger
        self._highest = 0

    def begin(self, position: int) -> None:
        """A step begins."""
        self.position = position
        self._highest = self._ledger.total

    def mark(self, action: object, script: Script | None = None, stage: int | None = None) -> None:
        """Take note of the memory at a moment: now, or when a script is at its peak.

        Args:
            action: printed where it is the peak's.
        """
        more = script.peak if script else 0
        now = self._ledger.total + more
        if now > self._highest:
            self._highest = now
        if now > self.peak.bytes:
            sizes = self._ledger.sizes
            if script is not None:
                sizes = tuple(map(operator.add, sizes, script.at_peak))
            self.peak = Peak(now, str(action), self.position, sizes)
        if stage is not None:
            own = self._ledger.of_stage[stage] + more
            if own > self.stage_peaks[stage]:
                self.stage_peaks[stage] = own

    def point(self) -> None:
        """A step ends that is a point of the curve."""
        self.peaks.append(self._highest)
        self.afters.append(self._ledger.total)

    def repeat(self, first: int, times: int) -> None:
        """The points from this one on come again."""
        self.peaks += self.peaks[first:] * times
        self.afters += self.afters[first:] * times


def is_counted(step: Step) -> bool:
    """Whether a step is a point of the curve."""
    return isinstance(step.action, Compute | SharedSum)


def counted(steps: Sequence[Step]) -> list[Action]:
    """The actions that are points of the curve."""
    return [step.action for step in steps if is_counted(step)]
