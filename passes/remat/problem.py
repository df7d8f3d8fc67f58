"""What is asked of one stage, without any torch in it: ops in a row, and what they keep.

A segment is a run of consecutive ops. Of the first forward it keeps the storages that it is given;
in the backward it runs again as a whole, and then has all that its ops save. It need not run to its
end: what comes after the last op that saves is left out, and that op too where it saves before its
kernel runs (`SavedTensors.early`). Ops in no segment keep what they save.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Storages: TypeAlias = frozenset[int]

Segment: TypeAlias = tuple[int, int]
"""The positions of its first op, and of the first op after it."""


@dataclass(frozen=True, slots=True)
class RematOp:
    """One op.

    Attributes:
        seconds: of its forward, for one micro-batch.
        saves: the storages that autograd keeps of it.
        early: whether it saves before its kernel runs.
        reads: for every value it reads, the position of the op that makes it (-1 for what the
            stage is given) and the storages that it looks into.
    """

    seconds: float
    saves: Storages = frozenset()
    early: bool = False
    reads: tuple[tuple[int, Storages], ...] = ()


@dataclass(slots=True)
class SecondRun:
    """The second run of a segment, step by step.

    Attributes:
        seconds: up to the last step that saves.
        waiting: of the steps after it, which run again only where a later one saves.
    """

    seconds: float = 0.0
    waiting: float = 0.0

    def add(self, step: RematOp) -> None:
        """The segment's next step."""
        if step.saves:
            self.seconds += self.waiting
            self.waiting = 0.0
            if not step.early:
                self.seconds += step.seconds
                return
        self.waiting += step.seconds


@dataclass(frozen=True, slots=True)
class RematProblem:
    """A stage, as what can run again of it.

    Problems of stages that are built alike are equal: storages are numbered as they appear.

    Attributes:
        sizes: bytes of every storage.
        places: before which op a segment may begin or end, ascending; the number of ops stands for
            the end.
        written: the segments that the model itself checkpoints, in order: what is in none of the
            chosen ones runs again all the same. No place lies inside of one.
    """

    steps: tuple[RematOp, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]
    written: tuple[Segment, ...] = ()

    def with_written(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Segments, and those of the model that lie in none of them, in order."""
        chosen = tuple(segments)
        left = (
            (start, stop)
            for start, stop in self.written
            if not any(one <= start and stop <= other for one, other in chosen)
        )
        return tuple(sorted((*chosen, *left)))

    def bytes(self, storages: Iterable[int]) -> int:
        """Of distinct storages."""
        return sum(map(self.sizes.__getitem__, storages))

    def given(self, segment: Segment) -> Storages:
        """The storages that a segment is given."""
        start, stop = segment
        return frozenset[int]().union(
            *(
                storages
                for step in self.steps[start:stop]
                for maker, storages in step.reads
                if maker < start
            )
        )

    def saved(self, segment: Segment) -> Storages:
        """The storages that its ops save."""
        start, stop = segment
        return frozenset[int]().union(*(step.saves for step in self.steps[start:stop]))

    def seconds(self, segment: Segment) -> float:
        """Of its second run."""
        start, stop = segment
        run = SecondRun()
        for step in self.steps[start:stop]:
            run.add(step)
        return run.seconds


@dataclass(frozen=True, slots=True)
class SegmentChoice:
    """Segments of a stage, and what they come to for one micro-batch.

    Attributes:
        segments: in order; none of them touches another's ops.
        seconds: of running them again.
        kept: bytes from the forward to the backward.
        peak: bytes at the worst moment of the backward: what is still kept, and what the segment at
            work has saved again. Without what ops need while they run.
        whole: bytes where all that was saved again stays until the backward has ended, as where it
            is split.
    """

    segments: tuple[Segment, ...]
    seconds: float
    kept: int
    peak: int
    whole: int


def evaluate(problem: RematProblem, segments: Collection[Segment]) -> SegmentChoice:
    """What some segments come to, by the definition, with those that the model itself has."""
    ordered = problem.with_written(segments)
    kept: set[int] = set()
    again: set[int] = set()
    held = peak = place = 0

    def keep(storages: Storages) -> int:
        new = storages - kept
        kept.update(new)
        return problem.bytes(new)

    for segment in ordered:
        held += sum(keep(step.saves) for step in problem.steps[place : segment[0]])
        held += keep(problem.given(segment))
        saved = problem.saved(segment)
        peak = max(peak, held + problem.bytes(saved - kept))
        again |= saved
        place = segment[1]
    held += sum(keep(step.saves) for step in problem.steps[place:])
    seconds = sum(map(problem.seconds, ordered))
    whole = held + problem.bytes(again - kept)
    return SegmentChoice(ordered, seconds, held, max(peak, held), whole)


def uniform(problem: RematProblem, count: int) -> list[Segment]:
    """All ops in this number of segments of as equal a number of ops as the places allow.

    With the square root of the number of ops this is Chen et al.'s (arXiv 1604.06174).
    """
    first, last = problem.places[0], problem.places[-1]
    goals = [first + (last - first) * index / count for index in range(count + 1)]
    ends = sorted({nearest(problem.places, goal) for goal in goals})
    return list(itertools.pairwise(ends))


def nearest(places: Sequence[int], goal: float) -> int:
    """The place closest to where one is wanted."""
    return min(places, key=lambda place: (abs(place - goal), place))
