"""Leaves out what a part repeats, so that it is traced with four of the blocks.

The two blocks in the middle must take memory in the same way, which `expand` sees; every block left
out is like these then: it calls the same on state of its own, or on state that all blocks have in
common, and is read by itself and the next one only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Graph, Stretch
from gpipe_compiler.ir.repeats import Blocks
from gpipe_compiler.ir.stretches import FIRST, KEPT, ShortStretch
from gpipe_compiler.passes.memory_trace.part import GraphPart

_LEAST = 2
"""Blocks left out from which on it is worth while."""


def shortened(part: GraphPart) -> tuple[GraphPart, ShortStretch] | None:
    """A part without the blocks that are left out; None where there are none to be."""
    runs = (run.aligned() for run in _runs(part))
    for run in sorted(runs, key=lambda run: run.stretch.size, reverse=True):
        if run.is_regular():
            return run.shortened(), run.blocks.short
    return None


def _runs(part: GraphPart) -> Iterator[_Run]:
    """Where the ops of a part go through many blocks."""
    place = part.graph.once(("places in blocks", part.graph.repeats), lambda: _places(part.graph))
    rows = [(*place.get(op.name, (-1, -1)), at) for at, op in enumerate(part.ops)]

    def key(row: tuple[int, int, int]) -> tuple[int, int]:
        return row[0], row[1] - row[2]

    for (stretch, _), group in itertools.groupby(rows, key):
        ops = list(group)
        if stretch >= 0:
            period = part.graph.repeats[stretch].period
            yield _Run(part, Stretch(ops[0][2], period, len(ops) // period))


def _places(graph: Graph) -> Mapping[str, tuple[int, int]]:
    """The stretch and the position of every op that is in one."""
    return {
        graph.ops[position].name: (number, position)
        for number, stretch in enumerate(graph.repeats)
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

    def shortened(self) -> GraphPart:
        """The part without the third block and those after it, up to the last but two."""
        part, ops = self.part, self.blocks.shortened()
        read = {name for op in ops for name in op.states(part.graph.modules)}
        return dataclasses.replace(
            part,
            ops=ops,
            segments=_without(part.segments, self.blocks.short),
            writes=tuple(name for name in part.writes if name in read),
            calls=_without(part.calls, self.blocks.short),
        )

    def is_regular(self) -> bool:
        """Whether all blocks but the last are alike in what the ops do not tell."""
        return (
            self.stretch.count >= KEPT + _LEAST
            and self.blocks.is_closed(self.part.results)
            and self._has_states_alike()
            and self._has_ranges_alike()
        )

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.stretch, self.part.ops, self.part.graph.modules)

    def _has_states_alike(self) -> bool:
        """Whether each state is of one block alone, or of all of them at the same place.

        What is written is of none: the runtime keeps it for all of the part.
        """
        rows = self.blocks.states
        common = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
        own = [{n for n, all_ in zip(row, common, strict=True) if not all_} for row in rows]
        shared = {name for name, all_ in zip(rows[0], common, strict=True) if all_}
        names = set().union(*own)
        outside = (*self.part.ops[: self.stretch.start], *self.part.ops[self.stretch.end :])
        others = {name for op in outside for name in op.states(self.part.graph.modules)}
        return (
            len(names) == sum(map(len, own))
            and names.isdisjoint(others | shared)
            and (names | shared).isdisjoint(self.part.writes)
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


def _without(ranges: Iterable[range], short: ShortStretch) -> tuple[range, ...]:
    kept = (one for one in ranges if one.start not in short.gap)
    return tuple(range(short.in_short(one.start), short.in_short(one.stop)) for one in kept)
