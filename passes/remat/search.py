"""The dynamic programming over places (see `choices`).

All that leads to one place is a table with a row for each way, so that a move goes on from all of
them at once.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpipe_compiler.passes.remat.problem import RematOp, RematProblem, SecondRun, Segment, Storages

WAYS = 64
"""To every place, with the same storages kept, at most."""

_BLOCK = 256
"""Rows that are held at once against those that are known to stay."""

Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def search(
    problem: RematProblem, places: Sequence[int], allowed: Collection[Segment] | None = None
) -> list[tuple[Segment, ...]]:
    """The segments with ends at some places that no others are better than.

    Where there are too many ways to a place, they are the best of a part.

    Args:
        allowed: the segments there may be, beside those of the model; None for any.
    """
    return _Search(problem, places, allowed).run()


@dataclass(frozen=True, slots=True)
class _Move:
    """From one place to a later one.

    Attributes:
        keeps: which storages are kept.
        saved: those besides that are there while the segment runs again.
        segment: whether there is one; else all is kept that is saved on the way.
    """

    later: int
    seconds: float
    keeps: Flags
    saved: Flags
    segment: bool


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The steps between two places that follow one another.

    Attributes:
        saves: the storages that they save.
        reads: those that they read, and `makers` the positions of the steps that make these.
    """

    steps: Sequence[RematOp]
    saves: Rows
    reads: Rows
    makers: Rows

    @classmethod
    def of(cls, steps: Sequence[RematOp]) -> _Stretch:
        reads = [(number, maker) for s in steps for maker, own in s.reads for number in own]
        rows = np.array(reads, dtype=np.int64).reshape(-1, 2)
        saves = [number for step in steps for number in step.saves]
        return cls(steps, np.array(saves, dtype=np.int64), rows[:, 0], rows[:, 1])


@dataclass(frozen=True, slots=True)
class _Ways:
    """What may have been decided up to a place, a row for each way.

    Attributes:
        kept: bytes.
        peak: bytes at the worst moment so far.
        group: of the ways with the same storages kept, ascending.
        before: the index of the place that it comes from, -1 at the start.
        row: of the way that it goes on from, there.
        segment: whether what lies between is one.
    """

    seconds: Numbers
    kept: Rows
    peak: Rows
    group: Rows
    before: Rows
    row: Rows
    segment: Flags

    def __len__(self) -> int:
        return len(self.seconds)

    def rows(self, wanted: Rows) -> _Ways:
        return _Ways(*(getattr(self, name)[wanted] for name in _COLUMNS))


_COLUMNS = tuple(_Ways.__slots__)


@dataclass
class _Arrivals:
    """The best ways to reach a place.

    Attributes:
        groups: a number for each set of storages of its columns that is kept.
    """

    columns: Rows
    tables: list[_Ways]
    groups: dict[bytes, int]

    def numbers(self, kept: Flags) -> Rows:
        """Of the groups with these storages; a row for each."""
        packed = np.packbits(kept, axis=1)
        groups = self.groups
        return np.array(
            [groups.setdefault(row.tobytes(), len(groups)) for row in packed], dtype=np.int64
        )

    def kept(self) -> Flags:
        """For each group the columns that are kept."""
        width = (len(self.columns) + 7) // 8
        packed = np.frombuffer(b"".join(self.groups), dtype=np.uint8)
        packed = packed.reshape(len(self.groups), width)
        return np.unpackbits(packed, axis=1, count=len(self.columns)).astype(bool)

    def ways(self) -> _Ways:
        """The best of all."""
        whole = _Ways(*(np.concatenate([getattr(t, n) for t in self.tables]) for n in _COLUMNS))
        # Of ways that come to the same, the one that came first.
        order = np.lexsort((whole.peak, whole.kept, whole.seconds, whole.group))
        ends = np.flatnonzero(np.diff(whole.group[order])) + 1
        chosen = []
        for rows in np.split(order, ends):
            best = rows[undominated(whole.kept[rows], whole.peak[rows])]
            chosen.append(_thinned(whole, best, WAYS))
        return whole.rows(np.concatenate(chosen))


class _Search:
    """One run over some places."""

    def __init__(
        self, problem: RematProblem, places: Sequence[int], allowed: Collection[Segment] | None
    ) -> None:
        self.problem, self.allowed = problem, allowed
        self.places = places
        self.sizes = np.array(problem.sizes, dtype=np.int64)
        self.arrivals = [
            _Arrivals(np.array(sorted(storages), dtype=np.int64), [], {})
            for storages in _open(problem, places)
        ]
        self.stretches = [
            _Stretch.of(problem.steps[start:stop]) for start, stop in itertools.pairwise(places)
        ]
        self.ways: list[_Ways] = []

    def run(self) -> list[tuple[Segment, ...]]:
        self._start()
        for index in range(len(self.places)):
            self.ways.append(self.arrivals[index].ways())
            self._go_on(index)
        return list({self._segments(row): None for row in range(len(self.ways[-1]))})

    def _start(self) -> None:
        first = self._nothing()
        first[list(self.problem.saved((0, self.places[0])))] = True
        start = np.array([self.sizes[first].sum()])
        arrivals = self.arrivals[0]
        group = arrivals.numbers(first[arrivals.columns][None])
        nothing = np.zeros(1, dtype=np.int64)
        arrivals.tables.append(
            _Ways(np.zeros(1), start, start, group, nothing - 1, nothing, nothing > 0)
        )

    def _go_on(self, index: int) -> None:
        """Make all moves from a place."""
        ways = self.ways[index]
        here = self.arrivals[index]
        kept = here.kept()
        sizes = self.sizes[here.columns]
        rows = np.arange(len(ways))
        before = np.full(len(ways), index)
        for move in self._moves(index):
            added = self.sizes[move.keeps].sum() - kept @ (sizes * move.keeps[here.columns])
            there = self.sizes[move.saved].sum() - kept @ (sizes * move.saved[here.columns])
            target = self.arrivals[move.later]
            left = np.zeros((len(kept), len(target.columns)), dtype=bool)
            _, theirs, mine = np.intersect1d(
                target.columns, here.columns, assume_unique=True, return_indices=True
            )
            left[:, theirs] = kept[:, mine]
            left |= move.keeps[target.columns]
            now = ways.kept + added[ways.group]
            target.tables.append(
                _Ways(
                    ways.seconds + move.seconds,
                    now,
                    np.maximum(ways.peak, now + there[ways.group]),
                    target.numbers(left)[ways.group],
                    before,
                    rows,
                    np.full(len(ways), move.segment),
                )
            )

    def _nothing(self) -> Flags:
        return np.zeros(len(self.sizes), dtype=bool)

    def _moves(self, index: int) -> Iterator[_Move]:
        """From a place: to keep what comes up to the next, and the segments."""
        places, written = self.places, self.problem.written
        given, saved, again = self._nothing(), self._nothing(), SecondRun()
        for later in range(index + 1, len(places)):
            stretch = self.stretches[later - 1]
            for step in stretch.steps:
                again.add(step)
            saved[stretch.saves] = True
            given[stretch.reads[stretch.makers < places[index]]] = True
            segment = places[index], places[later]
            if later == index + 1 and segment not in written:
                yield _Move(later, 0.0, saved.copy(), self._nothing(), segment=False)
            inside = saved & ~given
            allowed = self.allowed is None or segment in self.allowed or segment in written
            if allowed and inside.any():
                yield _Move(later, again.seconds, given.copy(), inside, segment=True)

    def _segments(self, row: int) -> tuple[Segment, ...]:
        """Those of a way to the end."""
        found: list[Segment] = []
        index = len(self.places) - 1
        while index > 0:
            ways = self.ways[index]
            before = int(ways.before[row])
            if ways.segment[row]:
                found.append((self.places[before], self.places[index]))
            index, row = before, int(ways.row[row])
        return tuple(reversed(found))


def _open(problem: RematProblem, places: Sequence[int]) -> list[Storages]:
    """For every place, the storages that may be kept both by what comes before and after it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(problem.steps):
        for number in step.saves.union(*(storages for _, storages in step.reads)):
            first.setdefault(number, position)
            last[number] = position
    return [
        frozenset(number for number, start in first.items() if start < place <= last[number])
        for place in places
    ]


def undominated(kept: Rows, peak: Rows) -> Rows:
    """The rows that none before keeps and needs as little as; the fastest come first."""
    best: list[int] = []
    # A staircase of those so far: ascending in what they keep, descending in their peaks.
    stairs: list[int] = []
    peaks: list[int] = []
    for start in range(0, len(kept), _BLOCK):
        block = slice(start, start + _BLOCK)
        places = np.searchsorted(np.array(stairs, dtype=np.int64), kept[block], side="right")
        lowest = np.array([np.iinfo(np.int64).max, *peaks])
        left = np.flatnonzero(lowest[places] > peak[block]) + start
        for row, mine, high in zip(
            left.tolist(), kept[left].tolist(), peak[left].tolist(), strict=True
        ):
            place = bisect.bisect_right(stairs, mine)
            if place and peaks[place - 1] <= high:
                continue
            end = place
            while end < len(stairs) and peaks[end] >= high:
                end += 1
            stairs[place:end] = [mine]
            peaks[place:end] = [high]
            best.append(row)
    return np.array(best, dtype=np.int64)


def _thinned(ways: _Ways, rows: Rows, most: int) -> Rows:
    """At most about `count` rows: of those that keep and need about the same, the fastest.

    Those that keep the least, need the least, or both together, stay.

    Args:
        rows: the fastest first.
    """
    if len(rows) <= most:
        return rows
    side = math.isqrt(most)
    seconds, kept, peak = ways.seconds[rows], ways.kept[rows], ways.peak[rows]
    # By their ratio: in little memory, small differences count.
    cells = _cells(kept, side) * (side + 1) + _cells(peak, side)
    fastest = np.sort(np.unique(cells, return_index=True)[1])
    least = [int(np.lexsort((seconds, size))[0]) for size in (kept, peak, kept + peak)]
    return rows[list(dict.fromkeys((*fastest.tolist(), *least)))]


def _cells(sizes: Rows, side: int) -> Rows:
    """So many cells of about equal ratios, and for each of the sizes its own."""
    parts, powers = np.frexp(sizes + 1.0)  # a logarithm differs in its last digit by processor
    logs = powers + 2 * parts
    width = (logs.max() - logs.min()) / side or 1
    cells: Rows = ((logs - logs.min()) / width).astype(np.int64)
    return cells
