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
from functools import lru_cache

from gpipe_compiler.passes.remat.problem import (
    RematProblem,
    Segment,
    SegmentChoice,
    evaluate,
    uniform,
)
from gpipe_compiler.passes.remat.search import search

MANY = 96
"""Places that are looked at, at most, for a plan that is to be used."""

FEW = 24
"""The same, while plans are compared."""

_ALL_COUNTS = 2
"""For a plan that is to be used: up to this multiple of the square root of the number of ops, every
number of equal segments is looked at; beyond it, and while plans are compared, each `_NEXT`th."""

_NEXT = 1.2

_ASIDE = 1 / 3
"""The share of a segment by which its ends may lie off from those of equal ones."""


@lru_cache(maxsize=512)
def choices(problem: RematProblem, most: int = MANY) -> tuple[SegmentChoice, ...]:
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
    found = {choice.segments: choice for choice in known}
    for segments in search(problem, _some_places(problem.places, most, crossing, wanted)):
        if segments not in found:
            found[segments] = evaluate(problem, segments)
    return tuple(_undominated(found.values()))


@lru_cache(maxsize=512)
def choices_of(problem: RematProblem, segments: tuple[Segment, ...]) -> tuple[SegmentChoice, ...]:
    """The undominated choices of some of these segments, the fastest first."""
    fitting = frozenset(segment for segment in segments if not _opens(problem, segment))
    ends = {problem.places[0], problem.places[-1], *itertools.chain(*fitting, *problem.written)}
    chosen = search(problem, sorted(ends), fitting)
    return tuple(_undominated(evaluate(problem, some) for some in chosen))


def _opens(problem: RematProblem, segment: Segment) -> bool:
    """Whether an end of a segment lies inside of one that the model itself checkpoints."""
    return any(start < end < stop for start, stop in problem.written for end in segment)


def _usual(problem: RematProblem) -> list[SegmentChoice]:
    """What people take: nothing, everything at once, and equal segments, the last one kept."""
    first, last = problem.places[0], problem.places[-1]
    several = uniform(problem, max(1, round(math.sqrt(last - first))))
    plans: list[Sequence[Segment]] = [(), ((first, last),), several, several[:-1]]
    return [evaluate(problem, plan) for plan in plans]


def _spaced(problem: RematProblem, crossing: Sequence[int], *, every: bool) -> list[SegmentChoice]:
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
    """The ends of that many segments, or of fewer where there are not as many places."""
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


def _undominated(found: Iterable[SegmentChoice]) -> list[SegmentChoice]:
    """Those that no other is at least as good as, whether a backward is split or not."""
    best: list[SegmentChoice] = []
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
    """At most about `count` of the places, and the wanted ones: those where the least crosses.

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
