"""The longest stage where a value goes to several later stages: sent once to each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut.contract import Movable
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.search import Extensions
from gpipe_compiler.passes.cut.space import SEND, Booleans, Floats, Integers, Space
from gpipe_compiler.passes.cut.tables import Tables

ENTRIES = 1_500_000
"""Numbers in the labels of a stage at most, about."""

MOST_LABELS = 5_000
"""Per stage."""


@dataclass(frozen=True)
class Sends:
    """The longest stage with its transfers, where each stage receives as fast from all others.

    A label is (the longest stage so far; for every value that crosses the down-set, the seconds
    that sending it to all later stages takes). What a stage sends is so known when it is put
    before those that use it. A value with one reader is sent once; then no label is needed for it
    if all links are equal, as `Row.times` has that.

    Attributes:
        values: those in the labels.
        live: whether each crosses each down-set, shape (down-sets, values).
        taken: how many of its readers are in each, likewise.
    """

    lineup: DeviceOrder
    beam: int
    values: tuple[Movable, ...]
    live: Booleans = field(repr=False)
    taken: Integers = field(repr=False)

    @classmethod
    def of(cls, space: Space, lineup: DeviceOrder) -> Sends | None:
        """For a family and an order of devices; None where links differ by the sender."""
        if lineup.shared or not lineup.alike:
            return None
        equal = len({pace.receives for pace in lineup.paces[1:]}) < 2
        chosen = [v for v, value in enumerate(space.graph.values) if not equal or value.shared]
        values = tuple(space.graph.values[v] for v in chosen)
        beam = max(16, min(MOST_LABELS, ENTRIES // (1 + len(values))))
        return cls(lineup, beam, values, space.crossing(chosen), space.readers(chosen))

    @property
    def most_extensions(self) -> int | None:
        """See `Criterion`."""
        return 4 * self.beam

    @property
    def monotone(self) -> bool:
        """See `Criterion`."""
        return True

    def initial(self) -> Floats:
        """See `Criterion`."""
        return np.zeros(1 + len(self.values))

    def promise(self, space: Space, tables: Tables, stage: int, stages: int) -> Floats:
        """See `Criterion`: those before, and the average of the rest."""
        rest = space.inside[-1][:2, -1:] - space.inside[-1][:2]
        return np.asarray(np.maximum(tables.stage_s[stage], rest.sum(axis=0) / (stages - stage)))

    def cheap(
        self, space: Space, tables: Tables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: each value sent once."""
        longest = np.maximum(self._plain(stage, new), labels[new.label, 0])
        return np.asarray(np.maximum(longest, tables.stage_s[stage, new.start]))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """See `Criterion`."""
        start, end = self.live[new.start], self.live[new.end]
        used = self.taken[new.end] > self.taken[new.start]
        pace = self.lineup.paces[stage]
        later = labels[:, 1:]
        # What crosses the end of a stage and not its start is made in it.
        further = ((later - self._seconds(pace.sends)) * (end & ~start)).sum(axis=1)
        extended = np.empty_like(labels)
        extended[:, 0] = np.maximum(labels[:, 0], self._plain(stage, new) + further)
        extended[:, 1:] = (later + used * self._seconds(pace.receives)) * start
        return extended

    def bound(
        self, space: Space, tables: Tables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`."""
        return np.asarray(np.maximum(labels[:, 0], tables.stage_s[stage, start]))

    def _plain(self, stage: int, new: Extensions) -> Floats:
        again = self.lineup.again[stage] * new.forward_s
        moved = new.receive_s + new.gradient_s + new.times[SEND]
        return np.asarray(new.forward_s + new.backward_s + again + moved)

    def _seconds(self, link: Link) -> Floats:
        """Of every value, there and back."""
        return np.array([value.receive_s(link) + value.gradient_s(link) for value in self.values])
