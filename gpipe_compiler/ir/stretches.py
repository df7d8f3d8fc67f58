"""Where a block repeats: things in a row, each like the one a period before.

The things are the ops of a graph, those of a stage, or what a list of modules holds. What is asked
of all blocks is asked of four of them: the first, two in the middle and the last. Where the two in
the middle are found to be alike, so is every block that was left out between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

FIRST = 2
"""The blocks that stay before those left out."""

KEPT = 4
"""The blocks that stay."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a block repeats.

    Attributes:
        start: the position of the first thing.
        period: things in a block.
        count: blocks.
    """

    start: int
    period: int
    count: int

    @property
    def size(self) -> int:
        """All things in the blocks."""
        return self.period * self.count

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.size

    def block(self, position: int) -> int | None:
        """The block that a position is in."""
        number = (position - self.start) // self.period
        return number if 0 <= number < self.count else None


@dataclass(frozen=True, slots=True)
class ShortStretch:
    """A stretch without some of its blocks, which are those after the first two.

    Attributes:
        whole: the stretch with all blocks.
        kept: how many stay, two or more.
    """

    whole: Stretch
    kept: int = KEPT

    @property
    def stretch(self) -> Stretch:
        """Where those that stay lie once the others are left out."""
        return Stretch(self.whole.start, self.whole.period, self.kept)

    @property
    def left_out(self) -> range:
        return range(FIRST, FIRST + self.whole.count - self.kept)

    @property
    def all_kept(self) -> tuple[int, ...]:
        return (*range(FIRST), *range(self.left_out.stop, self.whole.count))

    @property
    def gap(self) -> range:
        """The positions of those that are left out."""
        start, period = self.whole.start, self.whole.period
        return range(start + self.left_out.start * period, start + self.left_out.stop * period)

    def in_full(self, position: int) -> int:
        """The position in the whole of what is at one once they are left out."""
        return position if position < self.gap.start else position + len(self.gap)

    def in_short(self, position: int) -> int:
        """The other way round, for what stays."""
        return position if position <= self.gap.start else position - len(self.gap)


def alike_in_a_row(
    count: int, period: int, is_alike: Callable[[int], bool], least: int
) -> Iterator[range]:
    """The longest rows of things that are each like the one a period before.

    Args:
        count: of all things.
        is_alike: whether the thing at a position is; asked in order.
        least: blocks of the shortest row.
    """
    start = period
    for position in range(period, count + 1):
        if position < count and is_alike(position):
            continue
        if position - start >= (least - 1) * period:
            yield range(start - period, position)
        start = position + 1
