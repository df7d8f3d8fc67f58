"""How what is to be short follows from the stages: GPipe's step in closed form, a bound of 1F1B's,
and the longest stage, which sends a value once to each later stage that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut.contract import Movable
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.search import Criterion, Extensions
from gpipe_compiler.passes.cut.space import Booleans, Floats, Integers, Space
from gpipe_compiler.passes.cut.tables import BoundTables

TIE = 1e-10
"""With one micro-batch no machine's speed matters; the faster slowest one is then preferred."""


@dataclass(frozen=True)
class FillDrain(Criterion):
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
    """

    microbatches: int
    again: Floats
    updates: bool
    beam: int = 200_000

    @property
    def _repeats(self) -> float:
        return self.microbatches - 1 or TIE

    def initial(self) -> Floats:
        return np.zeros(5 if self.updates else 3)

    def promise(self, space: Space, tables: BoundTables, stage: int, stages: int) -> Floats:
        rest = space.inside[-1][:, -1:] - space.inside[-1]
        forward, backward = rest[:2] / (stages - stage)
        backward = backward + self.again[stage:].min() * forward
        slowest = np.maximum(tables.forward_s[stage], forward) + np.maximum(
            tables.backward_s[stage], backward
        )
        return np.asarray(tables.way_s[stage] + rest[0] + rest[1] + self._repeats * slowest)

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        forward, backward, receive, gradient, _, update, _ = new.times
        extended = np.empty_like(labels)
        np.maximum(labels[:, 0], np.maximum(forward, receive), out=extended[:, 0])
        slowest = np.maximum(labels[:, 1], backward + self.again[stage] * forward)
        np.maximum(slowest, gradient, out=extended[:, 1])
        machines = receive + forward + backward + gradient
        np.add(labels[:, 2], machines, out=extended[:, 2])
        if self.updates:
            ended = labels[:, 3] + backward
            extended[:, 3] = ended + gradient
            updated = ended + self._repeats * slowest + update
            np.maximum(labels[:, 4], updated, out=extended[:, 4])
        return extended

    def bound(
        self, space: Space, tables: BoundTables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        forward = self._repeats * np.maximum(labels[:, 0], tables.forward_s[stage, start])
        backward = self._repeats * np.maximum(labels[:, 1], tables.backward_s[stage, start])
        step = labels[:, 2] + tables.way_s[stage, start] + forward + backward
        if self.updates:
            there = space.inside[-1][0, start] + labels[:, 2] - labels[:, 3]
            step = np.maximum(step, there + forward + labels[:, 4])
        return np.asarray(step)


@dataclass(frozen=True)
class Rounds(Criterion):
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
    beam: int

    def initial(self) -> Floats:
        return np.zeros(2)

    def promise(self, space: Space, tables: BoundTables, stage: int, stages: int) -> Floats:
        return promise(space, tables, stage, stages, self.microbatches)

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        m, warm = self.microbatches, min(self.microbatches, self.stages - stage)
        forward, backward, receive, gradient, *_ = new.times
        own, rest = forward + backward, labels[:, 0]
        again = self.again[stage] * forward
        both = backward + again
        start = np.maximum(warm * forward + again, forward + rest)
        end = np.maximum(warm * both, backward + rest)
        if m > warm:
            phases = start + (m - warm) * (own + again) - again + end
        else:
            phases = np.maximum(start + warm * both - again, warm * forward + end)
        machine = np.maximum(np.maximum(forward, both), np.maximum(receive, gradient))
        asked = np.maximum(phases, own + rest + (m - 1) * machine)
        moved = receive + gradient
        return np.stack((own + rest + moved, moved + np.maximum(asked, own + labels[:, 1])), axis=1)

    def bound(
        self, space: Space, tables: BoundTables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
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
    space: Space,
    tables: BoundTables,
    stage: int,
    stages: int,
    microbatches: int,
    *,
    split: bool = False,
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


ENTRIES = 1_500_000
"""Numbers in the labels of a stage at most, about."""

MOST_LABELS = 5_000
"""Per stage."""


@dataclass(frozen=True)
class Sends(Criterion):
    """The longest stage with its transfers, where each stage receives as fast from all others.

    A label is (the longest stage so far; for every value that crosses the down-set, the seconds
    that sending it to all later stages takes). What a stage sends is so known when it is put
    before those that use it. A value with one reader is sent once; then no label is needed for it
    if all links are equal, as `Row.times` has that.

    Attributes:
        live: whether each crosses each down-set, shape (down-sets, values).
        taken: how many of its readers are in each, likewise.
    """

    device_order: DeviceOrder
    beam: int
    values: tuple[Movable, ...]
    live: Booleans = field(repr=False)
    taken: Integers = field(repr=False)

    @classmethod
    def of(cls, space: Space, device_order: DeviceOrder) -> Sends | None:
        """For a family and an order of devices; None where links differ by the sender."""
        if device_order.shared or not device_order.alike:
            return None
        equal = len({rate.receives for rate in device_order.rates[1:]}) < 2
        chosen = [v for v, value in enumerate(space.graph.values) if not equal or value.shared]
        values = tuple(space.graph.values[v] for v in chosen)
        beam = max(16, min(MOST_LABELS, ENTRIES // (1 + len(values))))
        return cls(device_order, beam, values, space.crossing(chosen), space.readers(chosen))

    @property
    def most_extensions(self) -> int | None:
        return 4 * self.beam

    def initial(self) -> Floats:
        return np.zeros(1 + len(self.values))

    def promise(self, space: Space, tables: BoundTables, stage: int, stages: int) -> Floats:
        """See `Criterion`: those before, and the average of the rest."""
        rest = space.inside[-1][:2, -1:] - space.inside[-1][:2]
        return np.asarray(np.maximum(tables.stage_s[stage], rest.sum(axis=0) / (stages - stage)))

    def cheap(
        self, space: Space, tables: BoundTables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: each value sent once."""
        longest = np.maximum(self._plain(stage, new), labels[new.label, 0])
        return np.asarray(np.maximum(longest, tables.stage_s[stage, new.start]))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        start, end = self.live[new.start], self.live[new.end]
        used = self.taken[new.end] > self.taken[new.start]
        rate = self.device_order.rates[stage]
        later = labels[:, 1:]
        # What crosses the end of a stage and not its start is made in it.
        further = ((later - self._seconds(rate.sends)) * (end & ~start)).sum(axis=1)
        extended = np.empty_like(labels)
        extended[:, 0] = np.maximum(labels[:, 0], self._plain(stage, new) + further)
        extended[:, 1:] = (later + used * self._seconds(rate.receives)) * start
        return extended

    def bound(
        self, space: Space, tables: BoundTables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        return np.asarray(np.maximum(labels[:, 0], tables.stage_s[stage, start]))

    def _plain(self, stage: int, new: Extensions) -> Floats:
        forward, backward, receive, gradient, _, _, send = new.times
        again = self.device_order.again[stage] * forward
        return np.asarray(forward + backward + again + (receive + gradient + send))

    def _seconds(self, link: Link) -> Floats:
        """Of every value, there and back."""
        return np.array([value.receive_s(link) + value.gradient_s(link) for value in self.values])
