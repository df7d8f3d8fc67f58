"""Integer programs end within their work, and what they say by then is still a bound.

The program is a knapsack-like packing that branch and bound does not finish; the truth is a packing
made by hand. Work is counted by the search's own stops, never by a clock.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.passes.cut import program as module
from gpipe_compiler.passes.cut.program import Linear, Program, total


def packing(items: list[float], bins: int) -> tuple[Program, Linear]:
    """The least that the fullest bin can hold."""
    made = Program()
    fullest = made.variable(0.0, sum(items))
    inside = [[made.variable(whole=True) for _ in range(bins)] for _ in items]
    for row in inside:
        held = total([(1.0, own) for own in row])
        made.at_least(held, Linear(1.0))
        made.at_least(Linear(1.0), held)
    for number in range(bins):
        load = total([(size, row[number]) for size, row in zip(items, inside, strict=True)])
        made.at_least(fullest, load)
    return made, fullest


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_the_least_is_that_of_all_packings(sizes: list[int], bins: int) -> None:
    made, fullest = packing([float(size) for size in sizes], bins)
    least = min(
        max(sum(s for s, b in zip(sizes, chosen, strict=True) if b == n) for n in range(bins))
        for chosen in itertools.product(range(bins), repeat=len(sizes))
    )

    solution = made.least(fullest, 10_000_000)

    assert solution.bound == pytest.approx(least, rel=1e-5)
    assert made.relaxed(fullest, 10_000_000)[0] <= solution.bound + 1e-6


def test_the_search_ends_within_its_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty uneven items in seven bins: equal halves of nothing, so a proof takes for ever."""
    asked: list[int] = []
    plain = module._Budget.__call__

    def counted(budget: module._Budget, event: object) -> None:
        asked.append(budget.asked)
        plain(budget, event)  # type: ignore[arg-type]  # what HiGHS gives is passed on

    monkeypatch.setattr(module._Budget, "__call__", counted)
    items = [math.sqrt(number) for number in range(2, 42)]
    made, fullest = packing(items, 7)
    work = 2_000
    stops = int(work * module.PER_STOP / made.rows**module.GROWTH)

    solution = made.least(fullest, work)

    assert stops < len(asked), "the program was too easy to try the budget"
    assert len(asked) < stops + 50  # HiGHS may ask a few times more while it comes to an end
    assert sum(items) / 7 * (1 - 1e-6) <= solution.bound <= sum(items) / 7 * 1.05


def test_the_same_work_gives_the_same_bound() -> None:
    items = [math.sqrt(number) for number in range(2, 42)]
    made, fullest = packing(items, 7)

    assert made.least(fullest, 2_000).bound == made.least(fullest, 2_000).bound


def test_what_cannot_be_is_infinite() -> None:
    made = Program()
    number = made.variable(whole=True)
    made.at_least(number, Linear(0.4))
    made.at_least(Linear(0.6), number)

    assert made.least(number, 1_000).bound == math.inf
    made.at_least(number, Linear(2.0))
    assert made.relaxed(number, 1_000)[0] == math.inf
