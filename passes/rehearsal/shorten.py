"""Leaves out what a part repeats, so that it is rehearsed with four of the blocks.

A first block, two in the middle and a last one stay. The two in the middle must take memory in the
same way, which `lengthen` sees; every block left out is like these then: it calls the same on state
of its own, or on state that all blocks have in common, and is read by itself and the next one only.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.blocks import reading
from gpipe_compiler.passes.rehearsal.part import Part

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
        period: ops in a block.
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

    def of(self, part: Part) -> tuple[Part, Gap] | None:
        """A part without the blocks that are left out; None where there are none to be."""
        runs = sorted(self._runs(part), key=lambda run: -run.period * run.count)
        for run in runs:
            if run.is_regular():
                return run.shortened()
        return None

    def _runs(self, part: Part) -> Iterator[_Run]:
        """Where the ops of a part go through many blocks."""
        rows = [(*self._place.get(op.name, (-1, -1)), at) for at, op in enumerate(part.ops)]

        def key(row: tuple[int, int, int]) -> tuple[int, int]:
            return row[0], row[1] - row[2]

        for (stretch, _), group in itertools.groupby(rows, key):
            ops = list(group)
            if stretch >= 0:
                period = self._graph.repeats[stretch].period
                count = len(ops) // period
                if count >= KEPT + _LEAST:
                    yield _Run(part, ops[0][2], period, count)

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
    """Blocks in a row, each of whose ops is like the one a period before (`passes.repeats`)."""

    part: Part
    start: int
    period: int
    count: int

    def shortened(self) -> tuple[Part, Gap]:
        """The part without the third block and those after it, up to the last but two."""
        part = self.part
        begin, end = self._end(FIRST - 1), self._end(self._last)
        ends = _made(self._block(self._last)), _made(self._block(FIRST - 1))
        seam = dict(zip(*ends, strict=True))
        after = [reading(op, seam) for op in self._block(self._last + 1)]
        ops = (*part.ops[:begin], *after, *part.ops[end + self.period :])
        read = {name for op in ops for name in op.states(part.graph.modules)}
        marks = [*self._marks[:begin], *self._marks[end:]]
        short = dataclasses.replace(
            part,
            ops=ops,
            segments=tuple(_segments(marks)),
            writes=tuple(name for name in part.writes if name in read),
        )
        return short, Gap(self.start, self.period, self.count - KEPT)

    def is_regular(self) -> bool:
        """Whether all blocks but the last are alike in what the ops do not tell."""
        return self._is_closed() and self._has_states_alike() and self._recomputes_alike()

    @property
    def _last(self) -> int:
        """The last block that is left out."""
        return self.count - KEPT + FIRST - 1

    def _end(self, block: int) -> int:
        return self.start + (block + 1) * self.period

    def _block(self, block: int) -> Sequence[Op]:
        return self.part.ops[self._end(block - 1) : self._end(block)]

    def _is_closed(self) -> bool:
        """Whether what is left out, and the block before it, is read there and right after only."""
        inner = range(FIRST - 1, self._last + 1)
        block_of = {name: block for block in inner for name in _made(self._block(block))}
        if any(name in block_of for name in self.part.results):
            return False
        for position, op in enumerate(self.part.ops):
            block = (position - self.start) // self.period
            for name in op.inputs:
                made = block_of.get(name)
                if made is not None and block not in (made, made + 1):
                    return False
        return True

    def _has_states_alike(self) -> bool:
        """Whether each state is of one block alone, or of all of them at the same place.

        What is written is of none: the runtime keeps it for all of the part.
        """
        modules = self.part.graph.modules
        rows = [
            [name for op in self._block(block) for name in op.states(modules)]
            for block in range(self.count)
        ]
        if len({len(row) for row in rows}) > 1:
            return False
        common = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
        own = [{n for n, all_ in zip(row, common, strict=True) if not all_} for row in rows]
        shared = {name for name, all_ in zip(rows[0], common, strict=True) if all_}
        names = set().union(*own)
        outside = (*self.part.ops[: self.start], *self.part.ops[self._end(self.count - 1) :])
        others = {name for op in outside for name in op.states(modules)}
        places = {tuple(row.index(name) for name in row) for row in rows}
        return (
            len(names) == sum(map(len, own))
            and names.isdisjoint(others | shared)
            and (names | shared).isdisjoint(self.part.writes)
            and len(places) == 1
        )

    def _recomputes_alike(self) -> bool:
        """Whether segments begin and end in all inner blocks at the same places."""
        marks = {
            tuple(self._marks[self._end(block - 1) : self._end(block)])
            for block in range(1, self.count - 1)
        }
        return len(marks) == 1

    @cached_property
    def _marks(self) -> Sequence[tuple[bool, bool]]:
        """For every op whether it is in a segment, and whether one begins with it."""
        found = [(False, False)] * len(self.part.ops)
        for segment in self.part.segments:
            for position in segment:
                found[position] = True, position == segment.start
        return found


def _segments(marks: Sequence[tuple[bool, bool]]) -> Iterator[range]:
    """The segments that such marks tell of."""
    start = 0
    for position, (inside, begins) in enumerate((*marks, (False, False))):
        before = position > 0 and marks[position - 1][0]
        if before and (begins or not inside):
            yield range(start, position)
        if begins:
            start = position


def _made(ops: Sequence[Op]) -> list[str]:
    return [name for op in ops for name in op.outputs]
