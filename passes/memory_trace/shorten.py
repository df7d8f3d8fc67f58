"""Leaves out what a part repeats, so that it is traced with four of the blocks.

A first block, two in the middle and a last one stay. The two in the middle must take memory in the
same way, which `expand` sees; every block left out is like these then: it calls the same on state
of its own, or on state that all blocks have in common, and is read by itself and the next one only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Graph, Stretch
from gpipe_compiler.ir.stretches import Blocks
from gpipe_compiler.passes.memory_trace.part import GraphPart

FIRST = 2
"""The blocks that stay before those left out."""

KEPT = 4
"""The blocks that stay."""

_LEAST = 2
"""Blocks left out from which on it is worth while."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Blocks that are left out of a part.

    Attributes:
        start: the position of the first of the blocks that stay.
        removed: how many are left out, after the first two.
    """

    start: int
    period: int
    removed: int

    def block(self, position: int) -> int | None:
        """Which of the blocks that stay has the op at a position of the shortened part."""
        block = (position - self.start) // self.period
        return block if 0 <= block < KEPT else None

    def in_full(self, position: int) -> int:
        """The position in the whole part of what is at one of the shortened part."""
        behind = position >= self.start + FIRST * self.period
        return position + self.removed * self.period if behind else position


class Shortening:
    """Shortens the parts of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def of(self, part: GraphPart) -> tuple[GraphPart, Gap] | None:
        """A part without the blocks that are left out; None where there are none to be."""
        runs = (run.aligned() for run in self._runs(part))
        for run in sorted(runs, key=lambda run: run.stretch.size, reverse=True):
            if run.is_regular():
                return run.shortened()
        return None

    def _runs(self, part: GraphPart) -> Iterator[_Run]:
        """Where the ops of a part go through many blocks."""
        rows = [(*self._place.get(op.name, (-1, -1)), at) for at, op in enumerate(part.ops)]

        def key(row: tuple[int, int, int]) -> tuple[int, int]:
            return row[0], row[1] - row[2]

        for (stretch, _), group in itertools.groupby(rows, key):
            ops = list(group)
            if stretch >= 0:
                period = self._graph.repeats[stretch].period
                yield _Run(part, Stretch(ops[0][2], period, len(ops) // period))

    @cached_property
    def _place(self) -> Mapping[str, tuple[int, int]]:
        """The stretch and the position of every op that is in one."""
        return {
            self._graph.ops[position].name: (number, position)
            for number, stretch in enumerate(self._graph.repeats)
            for position in range(stretch.start, stretch.end)
        }


@dataclass(frozen=True)
class _Run:
    """Blocks in a row in a part."""

    part: GraphPart
    stretch: Stretch

    def aligned(self) -> _Run:
        """The same, from the first op on that begins a block for calls and segments too."""
        start, period, size = self.stretch.start, self.stretch.period, self.stretch.size
        within = {(place - start) % period for one in self._ranges for place in one[1:]}
        shift = next((shift for shift in range(period) if shift not in within), size)
        return _Run(self.part, Stretch(start + shift, period, (size - shift) // period))

    def shortened(self) -> tuple[GraphPart, Gap]:
        """The part without the third block and those after it, up to the last but two."""
        part, period, removed = self.part, self.stretch.period, self.stretch.count - KEPT
        ops = self._blocks.without(range(FIRST, FIRST + removed))
        start = self.stretch.start + FIRST * period
        left_out = range(start, start + removed * period)
        read = {name for op in ops for name in op.states(part.graph.modules)}
        short = dataclasses.replace(
            part,
            ops=ops,
            segments=_without(part.segments, left_out),
            writes=tuple(name for name in part.writes if name in read),
            calls=_without(part.calls, left_out),
        )
        return short, Gap(self.stretch.start, period, removed)

    def is_regular(self) -> bool:
        """Whether all blocks but the last are alike in what the ops do not tell."""
        return (
            self.stretch.count >= KEPT + _LEAST
            and self._blocks.is_closed(self.part.results)
            and self._has_states_alike()
            and self._has_ranges_alike()
        )

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.stretch, self.part.ops, self.part.graph.modules)

    def _has_states_alike(self) -> bool:
        """Whether each state is of one block alone, or of all of them at the same place.

        What is written is of none: the runtime keeps it for all of the part.
        """
        rows = self._blocks.states
        if len({len(row) for row in rows}) > 1:
            return False
        common = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
        own = [{n for n, all_ in zip(row, common, strict=True) if not all_} for row in rows]
        shared = {name for name, all_ in zip(rows[0], common, strict=True) if all_}
        names = set().union(*own)
        outside = (*self.part.ops[: self.stretch.start], *self.part.ops[self.stretch.end :])
        others = {name for op in outside for name in op.states(self.part.graph.modules)}
        places = {tuple(row.index(name) for name in row) for row in rows}
        return (
            len(names) == sum(map(len, own))
            and names.isdisjoint(others | shared)
            and (names | shared).isdisjoint(self.part.writes)
            and len(places) == 1
        )

    @property
    def _ranges(self) -> Iterator[range]:
        """The ops of every call and segment that has some of these, but not all."""
        span = self.stretch
        for one in (*self.part.calls, *self.part.segments):
            outside = one.stop <= span.start or one.start >= span.end
            around = one.start <= span.start and one.stop >= span.end
            if not outside and not around:
                yield one

    def _has_ranges_alike(self) -> bool:
        """Whether calls and segments are of one block each, and alike in inner blocks."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.stretch.count)]
        for one in self._ranges:
            block, at = divmod(one.start - self.stretch.start, self.stretch.period)
            if block < 0 or at + len(one) > self.stretch.period:
                return False
            found[block].append((at, len(one)))
        return all(row == found[FIRST] for row in found[1:-1])


def _without(ranges: Iterable[range], left_out: range) -> tuple[range, ...]:
    def at(position: int) -> int:
        return position if position <= left_out.start else position - len(left_out)

    kept = (one for one in ranges if one.start < left_out.start or one.start >= left_out.stop)
    return tuple(range(at(one.start), at(one.stop)) for one in kept)
