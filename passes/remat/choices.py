"""Every choice of segments that is the cheapest for some memory.

Dynamic programming over the places between ops, from the first to the last. What has been decided
up to a place comes to three numbers (seconds, bytes kept, bytes at the worst moment so far) and to
which of the storages that later ops may keep as well are kept already. Of two ways to a place, one
is dropped where it is no better in any of them. Where a stage is so large that this leaves too
many, places or ways are thinned out: then the choices are the best of a part.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpipe_compiler.passes.remat.problem import (
    Choice,
    RematProblem,
    Segment,
    Storages,
    evaluate,
    uniform,
)

MANY = 96
"""Places that are looked at, at most, for a plan that is to be used."""

FEW = 24
"""The same, while plans are compared."""

WAYS = 64
"""To every place, with the same storages kept, at most."""


_ALL_COUNTS = 2
"""For a plan that is to be used: up to so many times the square root of the number of ops, every
number of equal segments is looked at; beyond it, and while plans are compared, each `_NEXT`th."""

_NEXT = 1.2

_ASIDE = 1 / 3
"""The share of a segment by which its ends may lie off from those of equal ones."""


@lru_cache(maxsize=512)
def choices(problem: RematProblem, most: int = MANY) -> tuple[Choice, ...]:
    """The undominated choices, the fastest first: that is no segment at all.

    None is worse than equal segments, as many as the square root of the number of ops, nor than
    one segment of everything, nor than segments of about equal length whose ends are where the
    least crosses.

    Args:
        most: places to look at.
    """
    if len(problem.places) < 2:
        return (evaluate(problem, ()),)
    crossing = _crossing(problem)
    known = [*_usual(problem), *_spaced(problem, crossing, every=most >= MANY)]
    wanted = {end for choice in _usual(problem) for segment in choice.segments for end in segment}
    search = _Search(problem, _some_places(problem.places, most, crossing, wanted))
    found = {choice.segments: choice for choice in (*known, *search.run())}
    return tuple(_undominated(found.values()))


def _usual(problem: RematProblem) -> list[Choice]:
    """What people take: nothing, everything at once, and equal segments, the last one kept."""
    first, last = problem.places[0], problem.places[-1]
    several = uniform(problem, max(1, round(math.sqrt(last - first))))
    plans: list[Sequence[Segment]] = [(), ((first, last),), several, several[:-1]]
    return [evaluate(problem, plan) for plan in plans]


def _spaced(problem: RematProblem, crossing: Sequence[int], *, every: bool) -> list[Choice]:
    """Segments of about equal length with ends where the least crosses, for many numbers of them:
    what a layered model does by hand, a few layers to a segment."""
    plans: dict[tuple[Segment, ...], None] = {}
    for count in _counts(problem.places[-1] - problem.places[0], every=every):
        ends = _ends(problem, crossing, count)
        segments = tuple(itertools.pairwise(ends))
        plans[segments] = plans[segments[:-1]] = None
    return [evaluate(problem, plan) for plan in plans]


def _counts(ops: int, *, every: bool) -> list[int]:
    small = round(_ALL_COUNTS * math.sqrt(ops)) if every else 1
    counts = list(range(2, small + 1))
    count = max(2, small + 1)
    while count <= ops // 2:
        counts.append(count)
        count = max(count + 1, round(count * _NEXT))
    return counts


def _ends(problem: RematProblem, crossing: Sequence[int], count: int) -> list[int]:
    """The ends of so many segments, or of fewer where there are not as many places."""
    places = problem.places
    first, last = places[0], places[-1]
    length = (last - first) / count
    found = {first, last}
    for index in range(1, count):
        goal = first + index * length
        low = bisect.bisect_left(places, goal - _ASIDE * length)
        high = bisect.bisect_right(places, goal + _ASIDE * length)
        near = places[low:high]
        if near:
            found.add(min(near, key=lambda place: (crossing[place], abs(place - goal))))
    return sorted(found)


def _undominated(found: Iterable[Choice]) -> list[Choice]:
    """Those that no other is at least as good as, whether a backward is split or not."""
    best: list[Choice] = []
    for choice in sorted(found, key=lambda c: (c.seconds, c.kept, c.peak, len(c.segments))):
        if not any(
            other.kept <= choice.kept and other.peak <= choice.peak and other.whole <= choice.whole
            for other in best
        ):
            best.append(choice)
    return best


def _some_places(
    places: Sequence[int], most: int, crossing: Sequence[int], wanted: Iterable[int]
) -> tuple[int, ...]:
    """At most about so many of the places, and the wanted ones: those where the least crosses.

    Half of them are the best of a stretch each, so that no part of the stage goes without. The
    others are the best of all; where more are as good, evenly from the first to the last.
    """
    if len(places) <= most:
        return tuple(places)
    half = most // 2
    found = set(wanted)
    share = len(places) / half
    for index in range(half):
        stretch = places[math.ceil(index * share) : math.ceil((index + 1) * share)]
        if stretch:
            found.add(min(stretch, key=lambda place: (crossing[place], place)))
    rest = [place for place in places if place not in found]
    if rest:
        worst = sorted(crossing[place] for place in rest)[min(half, len(rest)) - 1]
        better = [place for place in rest if crossing[place] < worst]
        equal = [place for place in rest if crossing[place] == worst]
        found.update(better)
        left = half - len(better)
        found.update(equal[index * len(equal) // left] for index in range(left))
    return tuple(sorted(found))


def _crossing(problem: RematProblem) -> list[int]:
    """For every place, the bytes that are read after it and were there before."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, step in enumerate(problem.steps):
        for maker, storages in step.reads:
            for number in storages:
                first[number] = min(first.get(number, maker), maker)
                last[number] = position
    change = [0] * (len(problem.steps) + 2)
    for number, start in first.items():
        change[start + 1] += problem.sizes[number]
        change[last[number] + 1] -= problem.sizes[number]
    return list(itertools.accumulate(change[:-1]))


@dataclass(frozen=True, slots=True)
class _Way:
    """What was decided up to a place.

    Attributes:
        before: the way it goes on from, and the segment it adds.
    """

    seconds: float
    kept: int
    peak: int
    before: tuple[_Way, Segment | None] | None = None

    def segments(self) -> tuple[Segment, ...]:
        found: list[Segment] = []
        way = self
        while way.before is not None:
            way, segment = way.before
            if segment is not None:
                found.append(segment)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class _Move:
    """From one place to a later one.

    Attributes:
        keeps: the storages that are kept.
        saved: those besides that are there while the segment runs again, and their bytes.
    """

    seconds: float
    keeps: Storages
    saved: Storages
    saved_bytes: int
    segment: Segment | None


class _Search:
    """One run over some places."""

    def __init__(self, problem: RematProblem, places: Sequence[int]) -> None:
        self.problem = problem
        self.places = places
        self.open = _open(problem, places)

    def run(self) -> list[Choice]:
        """The choices that are left at the end, judged anew."""
        first = self.problem.saved((0, self.places[0]))
        ways: list[dict[Storages, list[_Way]]] = [{} for _ in self.places]
        start = self.problem.bytes(first)
        ways[0][first & self.open[0]] = [_Way(0.0, start, start)]
        for index, place in enumerate(self.places):
            for kept, known in ways[index].items():
                ways[index][kept] = _thinned(_best(known), WAYS)
            for later, move in self._moves(index, place):
                for kept, known in ways[index].items():
                    target = ways[later].setdefault((kept | move.keeps) & self.open[later], [])
                    target.extend(self._made(known, kept, move))
        found = {way.segments() for known in ways[-1].values() for way in known}
        return [evaluate(self.problem, segments) for segments in found]

    def _made(self, known: Sequence[_Way], kept: Storages, move: _Move) -> list[_Way]:
        """The ways that go on by a move."""
        added = self.problem.bytes(move.keeps - kept)
        there = move.saved_bytes - self.problem.bytes(kept & move.saved)
        return [
            _Way(
                way.seconds + move.seconds,
                way.kept + added,
                max(way.peak, way.kept + added + there),
                (way, move.segment),
            )
            for way in known
        ]

    def _moves(self, index: int, place: int) -> list[tuple[int, _Move]]:
        """All moves from a place: to keep what comes up to the next, and the segments."""
        if index + 1 == len(self.places):
            return []
        problem = self.problem
        keeping = problem.saved((place, self.places[index + 1]))
        found = [(index + 1, _Move(0.0, keeping, frozenset(), 0, None))]
        given: set[int] = set()
        saved: set[int] = set()
        for later in range(index + 1, len(self.places)):
            for step in problem.steps[self.places[later - 1] : self.places[later]]:
                saved |= step.saves
                for maker, storages in step.reads:
                    if maker < place:
                        given |= storages
            inside = frozenset(saved - given)
            if inside:
                segment = place, self.places[later]
                seconds = problem.seconds(segment)
                size = problem.bytes(inside)
                found.append((later, _Move(seconds, frozenset(given), inside, size, segment)))
        return found


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


def _best(ways: list[_Way]) -> list[_Way]:
    """The ways that no other is as good as in everything."""
    ways.sort(key=lambda way: (way.seconds, way.kept, way.peak))
    best: list[_Way] = []
    # A staircase of those so far: ascending in what they keep, descending in their peaks.
    kept: list[int] = []
    peaks: list[int] = []
    for way in ways:
        place = bisect.bisect_right(kept, way.kept)
        if place and peaks[place - 1] <= way.peak:
            continue
        end = place
        while end < len(kept) and peaks[end] >= way.peak:
            end += 1
        kept[place:end] = [way.kept]
        peaks[place:end] = [way.peak]
        best.append(way)
    return best


def _thinned(ways: list[_Way], most: int) -> list[_Way]:
    """At most about so many: of those that keep and need about the same, the fastest.

    Those that keep the least, need the least, or both together, stay.
    """
    if len(ways) <= most:
        return ways
    side = math.isqrt(most)
    # By their ratio: in little memory, small differences count.
    kept = [math.log1p(way.kept) for way in ways]
    peaks = [math.log1p(way.peak) for way in ways]
    min_kept, min_peak = min(kept), min(peaks)
    width = (max(kept) - min(kept)) / side or 1
    height = (max(peaks) - min(peaks)) / side or 1
    cells: dict[tuple[int, int], _Way] = {}
    for way, mine, peak in zip(ways, kept, peaks, strict=True):  # the fastest first
        cell = int((mine - min_kept) / width), int((peak - min_peak) / height)
        cells.setdefault(cell, way)
    least = (
        min(ways, key=lambda way: (way.kept, way.seconds)),
        min(ways, key=lambda way: (way.peak, way.seconds)),
        min(ways, key=lambda way: (way.kept + way.peak, way.seconds)),
    )
    return list({id(way): way for way in (*cells.values(), *least)}.values())
