"""A static plan of memory: where in one arena every activation of a stage goes.

Greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
arXiv 2001.03288, section 5.2): the largest first, each into the smallest gap that fits between
those placed before it that live while it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from gpipe_compiler.passes.tapes import BlockKind, Event, StageTapes


class Alignment(IntEnum):
    """Bytes that the offset of a block is a multiple of."""

    CPU = 64
    """As torch's allocator for the host has it."""
    GPU = 512
    """As torch's caching allocator has it."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A block of memory, and when it is needed.

    Attributes:
        born, dies: moments; it is needed from the first up to, and not including, the second.
    """

    bytes: int
    born: int
    dies: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both are needed at some moment."""
        return self.born < other.dies and other.born < self.dies


@dataclass(frozen=True)
class StaticPlan:
    """An arena in which blocks that live at a time do not overlap.

    Attributes:
        offsets: in bytes, in the order of `lifetimes`.
    """

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    alignment: Alignment

    @property
    def no_reuse(self) -> int:
        """Bytes where every block has a place of its own."""
        return sum(_rounded(life.bytes, self.alignment) for life in self.lifetimes)

    @property
    def planned(self) -> int:
        """Bytes of the arena."""
        ends = (
            offset + _rounded(life.bytes, self.alignment)
            for offset, life in zip(self.offsets, self.lifetimes, strict=True)
        )
        return max(ends, default=0)

    @cached_property
    def lower_bound(self) -> int:
        """The most bytes that are needed at a time: no arena is smaller."""
        changes: dict[int, int] = {}
        for life in self.lifetimes:
            size = _rounded(life.bytes, self.alignment) * (life.dies > life.born)
            changes[life.born] = changes.get(life.born, 0) + size
            changes[life.dies] = changes.get(life.dies, 0) - size
        most = now = 0
        for moment in sorted(changes):
            now += changes[moment]
            most = max(most, now)
        return most


def place(lifetimes: Iterable[Lifetime], alignment: Alignment = Alignment.CPU) -> StaticPlan:
    """A place for every block; greedy, so not always the smallest arena."""
    lives = tuple(lifetimes)
    order = sorted(range(len(lives)), key=lambda i: (-lives[i].bytes, lives[i].born, i))
    offsets = [0] * len(lives)
    placed: list[int] = []  # by offset
    for index in order:
        life = lives[index]
        taken = (
            (offsets[i], offsets[i] + _rounded(lives[i].bytes, alignment))
            for i in placed
            if lives[i].meets(life)
        )
        offsets[index] = _best_gap(taken, _rounded(life.bytes, alignment))
        placed.append(index)
        placed.sort(key=offsets.__getitem__)
    return StaticPlan(lives, tuple(offsets), alignment)


def _best_gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """The start of the smallest gap that holds so many bytes, or the end of all that is taken.

    Args:
        taken: starts and ends, by start.
    """
    end, best, smallest = 0, -1, 0
    for start, stop in taken:
        gap = start - end
        if gap >= size and (best < 0 or gap < smallest):
            best, smallest = end, gap
        end = max(end, stop)
    return end if best < 0 else best


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


_OTHERS = frozenset({BlockKind.PARAMETER_GRADIENT, BlockKind.BUFFER, BlockKind.CAST})
"""What outlives a step, or is no activation."""


def in_training(tapes: StageTapes) -> tuple[Lifetime, ...]:
    """The blocks of one micro-batch's forward and backward, with all that ops make on the way.

    What the stage is given lives from the beginning, and what it hands on to the end. Gradients of
    parameters are not among them.
    """
    return _of_events(tapes, (*tapes.forward.events, *tapes.first_backward.events))


def in_forward(tapes: StageTapes) -> tuple[Lifetime, ...]:
    """The blocks of one forward, with all that ops make on the way."""
    return _of_events(tapes, tapes.forward.events)


def _of_events(tapes: StageTapes, events: Sequence[Event]) -> tuple[Lifetime, ...]:
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for moment, event in enumerate(events):
        (born if event.alive else dies)[event.block] = moment
    return tuple(
        Lifetime(tapes.blocks[number].bytes, born.get(number, 0), dies.get(number, len(events)))
        for number in sorted(born.keys() | dies.keys())
        if tapes.blocks[number].kind not in _OTHERS
    )
