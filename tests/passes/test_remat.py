"""Choices of segments: against all segmentations there are, and against what people take.

What a choice comes to is compared with a walk written here, which keeps and lets go storage by
storage as a forward and a backward would.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.passes.remat import FEW, RematProblem, SegmentChoice, choices, evaluate
from gpipe_compiler.passes.remat.problem import RematOp, Segment, uniform
from gpipe_compiler.passes.remat.search import undominated

MICROBATCHES = (1, 2, 5)


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> RematProblem:
    """Stages of few ops: every op makes a storage, or hands on a view, and reads earlier ones."""
    count = draw(st.integers(1, most))
    sizes = [draw(st.integers(1, 9))]
    holds = [(-1, 0)]
    steps = []
    for position in range(count):
        read = draw(st.lists(st.sampled_from(holds), min_size=1, max_size=2, unique=True))
        made = read[0][1]
        if draw(st.integers(0, 3)):
            made = len(sizes)
            sizes.append(draw(st.integers(1, 9)))
        saves = {number for _, number in (*read, (position, made)) if draw(st.booleans())}
        if draw(st.integers(0, 4)) == 0:
            saves.add(len(sizes))
            sizes.append(draw(st.integers(1, 9)))
        steps.append(
            RematOp(
                draw(st.integers(0, 5)),
                frozenset(saves),
                draw(st.booleans()),
                tuple((maker, frozenset((number,))) for maker, number in read),
            )
        )
        holds.append((position, made))
    places = sorted(draw(st.sets(st.integers(0, count), min_size=2)))
    free = RematProblem(tuple(steps), tuple(sizes), tuple(places))
    spans = draw(st.sets(st.sampled_from([*itertools.pairwise(places)])))
    written = sorted(span for span in spans if free.saved(span) - free.given(span))
    return dataclasses.replace(free, written=tuple(written))


def segmentations(places: tuple[int, ...]) -> list[tuple[Segment, ...]]:
    """All sets of segments that do not overlap."""
    if len(places) < 2:
        return [()]
    found = segmentations(places[1:])
    for index in range(1, len(places)):
        rest = segmentations(places[index:])
        found += [((places[0], places[index]), *others) for others in rest]
    return found


def least_seconds(found, microbatches, limit):
    """Of the choices that hold so many micro-batches within a limit."""
    return min(
        (c.seconds for c in found if (microbatches - 1) * c.kept + c.peak <= limit),
        default=math.inf,
    )


@settings(max_examples=150, deadline=None)
@given(problem=problems(), data=st.data())
def test_no_segmentation_is_better(problem: RematProblem, data: st.DataObject) -> None:
    """For any limit and number of micro-batches in flight, whole or split backward."""
    every = [evaluate(problem, segments) for segments in segmentations(problem.places)]
    found = choices(problem)

    assert {choice.segments for choice in found} <= {choice.segments for choice in every}
    largest = 5 * sum(problem.sizes)
    for microbatches in MICROBATCHES:
        limit = data.draw(st.integers(0, largest))
        assert least_seconds(found, microbatches, limit) == least_seconds(
            every, microbatches, limit
        )
    for mine in every:
        assert any(c.seconds <= mine.seconds and c.kept <= mine.kept for c in found)


def walked(problem: RematProblem, segments: tuple[Segment, ...]) -> tuple[int, int]:
    """Bytes kept by a forward, and at the worst moment of its backward."""
    holders: list[tuple[int, frozenset[int], bool]] = []
    position = 0
    while position < len(problem.steps):
        segment = next((s for s in segments if s[0] == position), None)
        if segment is None:
            holders.append((position, problem.steps[position].saves, False))
            position += 1
            continue
        read: set[int] = set()
        for step in problem.steps[segment[0] : segment[1]]:
            for maker, storages in step.reads:
                if maker < segment[0]:
                    read |= storages
        holders.append((position, frozenset(read), True))
        position = segment[1]
    stop_of = dict(segments)

    def size(held: list[tuple[int, frozenset[int], bool]], more: frozenset[int]) -> int:
        return sum(problem.sizes[n] for n in more.union(*(storages for _, storages, _ in held)))

    kept = worst = size(holders, frozenset())
    while holders:
        start, _, again = holders[-1]
        more: frozenset[int] = frozenset()
        if again:
            more = more.union(*(s.saves for s in problem.steps[start : stop_of[start]]))
        worst = max(worst, size(holders, more))
        holders.pop()
    return kept, worst


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_bytes_are_those_of_a_walk(problem: RematProblem, data: st.DataObject) -> None:
    segments = data.draw(st.sampled_from(segmentations(problem.places)))
    choice = evaluate(problem, segments)

    runs_again = {op for start, stop in choice.segments for op in range(start, stop)}
    asked = (*segments, *problem.written)
    assert runs_again == {op for start, stop in asked for op in range(start, stop)}
    assert (choice.kept, choice.peak) == walked(problem, choice.segments)
    assert choice.kept <= choice.peak <= choice.whole


@settings(max_examples=30, deadline=None)
@given(problem=problems(most=40), most=st.sampled_from([4, 12, 96]))
def test_never_worse_than_none_full_and_equal_segments(problem: RematProblem, most: int) -> None:
    """Also where places are thinned out."""
    first, last = problem.places[0], problem.places[-1]
    equal = uniform(problem, max(1, round(math.sqrt(last - first))))
    found = choices(problem, most)
    for segments in ([], [(first, last)], equal, equal[:-1]):
        usual = evaluate(problem, segments)
        assert any(as_good(choice, usual) for choice in found)


def residual_chain(layers: int) -> RematProblem:
    """Layers of five ops: a norm, widened four times, bent, narrowed, and added to what came in."""
    sizes = [1]
    steps: list[RematOp] = []
    came = (-1, frozenset({0}))
    for _ in range(layers):
        normed, widened, bent, out = (frozenset({len(sizes) + index}) for index in range(4))
        sizes += [1, 4, 4, 1]
        at = len(steps)
        steps += [
            RematOp(1.0, came[1], reads=(came,)),
            RematOp(4.0, normed, reads=((at, normed),)),
            RematOp(3.0, widened, reads=((at + 1, widened),)),
            RematOp(4.0, bent, reads=((at + 2, bent),)),
            RematOp(1.0, reads=(came, (at + 3, frozenset()))),
        ]
        came = (at + 4, out)
    return RematProblem(tuple(steps), tuple(sizes), tuple(range(len(steps) + 1)))


def test_segments_of_whole_layers_are_among_those_of_a_long_chain() -> None:
    """More ops than places that are looked at: the least memory is about that of the best number
    of layers to a segment, and not that of ends within layers, where more crosses."""
    layers = 60
    problem = residual_chain(layers)
    by_hand = []
    for each in range(1, 10):
        ends = [*range(0, 5 * layers, 5 * each), 5 * layers]
        by_hand.append(evaluate(problem, list(itertools.pairwise(ends))).peak)

    least = min(choice.peak for choice in choices(problem, FEW))

    assert least <= 1.1 * min(by_hand)


def as_good(choice: SegmentChoice, other: SegmentChoice) -> bool:
    return (
        choice.seconds <= other.seconds
        and choice.kept <= other.kept
        and choice.peak <= other.peak
        and choice.whole <= other.whole
    )


def test_what_runs_again_by_hand() -> None:
    """Three ops of 1, 2 and 4 seconds; the last saves what it reads before its kernel runs."""
    steps = (
        RematOp(1.0, frozenset({1}), reads=((-1, frozenset({0})),)),
        RematOp(2.0, reads=((0, frozenset({1})),)),
        RematOp(4.0, frozenset({2}), early=True, reads=((1, frozenset({2})),)),
    )
    problem = RematProblem(steps, (10, 100, 1000), (0, 1, 2, 3))

    everything = evaluate(problem, [(0, 3)])
    assert (everything.seconds, everything.kept, everything.peak) == (3.0, 10, 1110)
    last = evaluate(problem, [(1, 3)])
    assert (last.seconds, last.kept, last.peak) == (2.0, 100, 1100)
    middle = evaluate(problem, [(1, 2)])
    assert (middle.seconds, middle.kept) == (0.0, 1100)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 700), st.integers(1, 400))
def test_rows_stay_that_none_before_is_as_good_as(seed: int, rows: int, most: int) -> None:
    kept, peak = np.random.default_rng(seed).integers(0, most, (2, rows))
    found = undominated(kept, peak)
    wanted = [i for i in range(rows) if not ((kept[:i] <= kept[i]) & (peak[:i] <= peak[i])).any()]
    assert found.tolist() == wanted
