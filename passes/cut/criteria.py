"""How a step's time follows from its stages in closed form: GPipe's step, and a bound of 1F1B's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpipe_compiler.passes.cut.search import Extensions
from gpipe_compiler.passes.cut.space import Floats, Integers, Space
from gpipe_compiler.passes.cut.tables import Tables

TIE = 1e-10
"""With one micro-batch no machine's speed matters; the faster slowest one is then preferred."""


@dataclass(frozen=True)
class FillDrain:
    """GPipe's step, and inference (where backward takes no time), and updates after it.

    Equal jobs pass a line of machines in sum + (M - 1) x slowest machine; the forward line is
    through before the backward line starts. Recomputing, which all but the first micro-batch to
    come back need, is a set-up between two jobs: it slows a machine down, but no job waits for it
    twice.

    A label is (slowest forward machine, slowest backward machine, sum of all machines); where
    stages update their parameters, that sum is followed by (sum of the backward machines, from the
    forward line's end to that of the last update).

    Attributes:
        again: for every stage, 1 where it recomputes, else 0.
        updates: whether updates take time.
    """

    microbatches: int
    again: Floats
    updates: bool
    beam: int = 200_000
    most_extensions: int | None = None

    @property
    def _repeats(self) -> float:
        return self.microbatches - 1 or TIE

    @property
    def monotone(self) -> bool:
        """See `Criterion`."""
        return not self.updates

    def initial(self) -> Floats:
        """See `Criterion`."""
        return np.zeros(5 if self.updates else 3)

    def promise(self, space: Space, tables: Tables, stage: int, stages: int) -> Floats:
        """See `Criterion`."""
        rest = space.inside[-1][:, -1:] - space.inside[-1]
        forward, backward = rest[:2] / (stages - stage)
        backward = backward + self.again[stage:].min() * forward
        slowest = np.maximum(tables.forward_s[stage], forward) + np.maximum(
            tables.backward_s[stage], backward
        )
        return np.asarray(tables.way_s[stage] + rest[0] + rest[1] + self._repeats * slowest)

    def cheap(
        self, space: Space, tables: Tables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: extending costs nothing, so nothing is held back."""
        return np.zeros(len(new.start))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """See `Criterion`."""
        extended = np.empty_like(labels)
        np.maximum(labels[:, 0], np.maximum(new.forward_s, new.receive_s), out=extended[:, 0])
        pace = np.maximum(labels[:, 1], new.backward_s + self.again[stage] * new.forward_s)
        np.maximum(pace, new.gradient_s, out=extended[:, 1])
        machines = new.receive_s + new.forward_s + new.backward_s + new.gradient_s
        np.add(labels[:, 2], machines, out=extended[:, 2])
        if self.updates:
            ended = labels[:, 3] + new.backward_s
            extended[:, 3] = ended + new.gradient_s
            updated = ended + self._repeats * pace + new.update_s
            np.maximum(labels[:, 4], updated, out=extended[:, 4])
        return extended

    def bound(
        self, space: Space, tables: Tables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`."""
        forward = self._repeats * np.maximum(labels[:, 0], tables.forward_s[stage, start])
        backward = self._repeats * np.maximum(labels[:, 1], tables.backward_s[stage, start])
        step = labels[:, 2] + tables.way_s[stage, start] + forward + backward
        if self.updates:
            there = space.inside[-1][0, start] + labels[:, 2] - labels[:, 3]
            step = np.maximum(step, there + forward + labels[:, 4])
        return np.asarray(step)


@dataclass(frozen=True)
class Rounds:
    """A lower bound of 1F1B's step (one stage a device), as if it were the step.

    For every stage s: the way of the first micro-batch to it; its w warm-up forwards, or the
    first micro-batch's round trip through the later stages, whichever is longer; the steady
    phase; the same at the end; and the way of the last gradient back to stage 0. Every stage but
    the last recomputes every micro-batch; while it waits for a gradient, that costs nothing.

    A label is (one micro-batch's round through the later stages; the largest time, from when the
    first micro-batch reaches them to when the last gradient leaves them, that one of them asks).

    Attributes:
        again: for every stage, 1 where it recomputes every micro-batch, else 0.
    """

    microbatches: int
    stages: int
    again: Floats
    beam: int = 10_000
    most_extensions: int | None = None

    @property
    def monotone(self) -> bool:
        """See `Criterion`."""
        return True

    def initial(self) -> Floats:
        """See `Criterion`."""
        return np.zeros(2)

    def promise(self, space: Space, tables: Tables, stage: int, stages: int) -> Floats:
        """See `Criterion`."""
        return promise(space, tables, stage, stages, self.microbatches)

    def cheap(
        self, space: Space, tables: Tables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: extending costs nothing, so nothing is held back."""
        return np.zeros(len(new.start))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """See `Criterion`."""
        m, warm = self.microbatches, min(self.microbatches, self.stages - stage)
        forward, backward = new.forward_s, new.backward_s
        own, rest = forward + backward, labels[:, 0]
        again = self.again[stage] * forward
        both = backward + again
        start = np.maximum(warm * forward + again, forward + rest)
        end = np.maximum(warm * both, backward + rest)
        if m > warm:
            phases = start + (m - warm) * (own + again) - again + end
        else:
            phases = np.maximum(start + warm * both - again, warm * forward + end)
        machine = np.maximum(np.maximum(forward, both), np.maximum(new.receive_s, new.gradient_s))
        asked = np.maximum(phases, own + rest + (m - 1) * machine)
        moved = new.receive_s + new.gradient_s
        return np.stack((own + rest + moved, moved + np.maximum(asked, own + labels[:, 1])), axis=1)

    def bound(
        self, space: Space, tables: Tables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`."""
        m = self.microbatches
        inside = space.inside[-1][0, start] + space.inside[-1][1, start]
        way = tables.way_s[stage, start]
        line = np.maximum(tables.forward_s[stage, start], tables.backward_s[stage, start])
        step = np.maximum(way + labels[:, 1], m * tables.device_s[stage, start])
        step = np.maximum(step, way + labels[:, 0] + (m - 1) * line)
        repeats = [m - (min(m, self.stages - s) + 1) / 2 for s in range(stage)]
        if repeats and all(repeats):
            step = np.maximum(step, way + labels[:, 0] + inside / sum(1 / r for r in repeats))
        return np.asarray(step)


def promise(
    space: Space, tables: Tables, stage: int, stages: int, microbatches: int, *, split: bool = False
) -> Floats:
    """The busiest device on either side of a down-set, and the flow lines before it.

    Args:
        split: whether the weights' part of a backward comes later.
    """
    rest = space.inside[-1][:, -1:] - space.inside[-1]
    device = np.maximum(tables.device_s[stage], (rest[0] + rest[1]) / (stages - stage))
    line = np.maximum(tables.forward_s[stage], tables.backward_s[stage])
    line[~np.isfinite(line)] = 0.0  # no cut leads there, as the way says
    way = tables.way_s[stage] + rest[0] + rest[1] - rest[2] * split
    return np.asarray(np.maximum(microbatches * device, way + (microbatches - 1) * line))
