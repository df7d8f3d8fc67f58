"""The table of settings, compared with points made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_compiler.options import RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice, Frontier, ParetoPoint, SearchStatus
from gpipe_compiler.report.comparisons import format_ratio, frontier_document, reason, show_frontier
from gpipe_compiler.report.html import format_report
from gpipe_compiler.report.text import format_plan, plain_text
from gpipe_compiler.runtime.spec import ScheduleKind

GIB = 2**30
PLAIN = Choice(4, 4, ScheduleKind.ONE_F_ONE_B, 8)
BEST = ParetoPoint(PLAIN, SearchStatus.PLANNED, 1.0, 4 * GIB, bubble=0.2)


def other(**changes: object) -> Choice:
    fields = {"stages": 4, "devices": 4, "schedule": ScheduleKind.GPIPE, "microbatches": 8}
    return Choice(**(fields | changes))  # type: ignore[arg-type]  # fields by name


def beside_the_best(point: ParetoPoint) -> tuple[str, Frontier]:
    frontier = Frontier.of([BEST, point], 64)
    (same,) = (p for p in frontier.points if p.choice == point.choice)
    return reason(same, frontier), frontier


@pytest.mark.parametrize(
    ("point", "said"),
    [
        # Half the time waiting instead of a fifth: (1 - 0.2) / (1 - 0.5) = 1.6 times as long.
        (
            ParetoPoint(other(), SearchStatus.PLANNED, 1.6, 5 * GIB, bubble=0.5),
            "60% slower: bubble 50%",
        ),
        # Three quarters of what is not waited for is work: 4/3 times as long.
        (
            ParetoPoint(
                other(remat=RematChoice.FULL),
                SearchStatus.PLANNED,
                4 / 3,
                3 * GIB,
                bubble=0.2,
                recompute=0.2,
            ),
            "33% slower: recomputing 20%; 1 GiB less",
        ),
        (
            ParetoPoint(other(stages=2, devices=2), SearchStatus.PLANNED, 2.0, 5 * GIB, bubble=0.2),
            "2x slower: on 2, not 4 devices",
        ),
        # 4 x 2.5 x 0.8 device seconds of work instead of 4 x 1 x 0.8.
        (
            ParetoPoint(other(microbatches=64), SearchStatus.PLANNED, 2.5, 5 * GIB, bubble=0.2),
            "2.5x slower: smaller micro-batches cost 2.5x as much",
        ),
        # 4 x 2 x 0.6 against 4 x 1 x 0.8: 1.5 times; waiting: 0.8 / 0.6.
        (
            ParetoPoint(other(microbatches=4), SearchStatus.PLANNED, 2.0, 5 * GIB, bubble=0.4),
            "2x slower: larger micro-batches cost 50% more, bubble 40%",
        ),
        (
            ParetoPoint(other(), SearchStatus.PLANNED, 1.0, 5 * GIB, bubble=0.2),
            "same speed, 1 GiB more memory",
        ),
        (
            ParetoPoint(
                other(schedule=ScheduleKind.ZB_H1), SearchStatus.PLANNED, 1.0, 4 * GIB, bubble=0.2
            ),
            "the same, with zb-h1",
        ),
        (
            ParetoPoint(other(), SearchStatus.PLANNED, 0.5, 6 * GIB, int(1.2 * GIB), 0.1),
            "does not fit by 1.2 GiB",
        ),
        (
            ParetoPoint(other(), SearchStatus.LARGER, 0.5, 6 * GIB, 2 * GIB),
            "does not fit: at least 2 GiB too much",
        ),
        (
            ParetoPoint(other(), SearchStatus.SLOWER, 1.5, 6 * GIB),
            "not planned: its bounds already lose",
        ),
        (ParetoPoint(other(), SearchStatus.REFUSED, problem="too many stages"), "too many stages"),
        (ParetoPoint(other(), SearchStatus.NOT_REACHED), "not looked at: time was up"),
    ],
)
def test_why_a_setting_loses(point: ParetoPoint, said: str) -> None:
    words, frontier = beside_the_best(point)

    assert words == said
    assert frontier.chosen is not None
    assert frontier.chosen.choice == PLAIN
    assert reason(frontier.points[0], frontier) == "chosen"


@pytest.mark.parametrize(
    ("ratio", "said"), [(2.1, "2.1x"), (1.99, "99%"), (1.032, "3.2%"), (13.4, "13x"), (2.0, "2x")]
)
def test_ratios(ratio: float, said: str) -> None:
    assert format_ratio(ratio) == said


def test_of_equally_fast_ones_the_smaller_is_chosen_and_of_equal_ones_the_simpler() -> None:
    small = ParetoPoint(other(microbatches=16), SearchStatus.PLANNED, 1.0005, GIB)
    twin = ParetoPoint(other(microbatches=16, stages=8), SearchStatus.PLANNED, 1.0005, GIB)
    frontier = Frontier.of([BEST, twin, small], 64)

    assert frontier.chosen is not None
    assert frontier.chosen.choice == small.choice
    assert {p.choice for p in frontier.points if p.undominated} == {PLAIN, small.choice}


def test_nothing_is_chosen_where_nothing_fits_and_the_nearest_is_first() -> None:
    far = ParetoPoint(other(), SearchStatus.PLANNED, 0.5, 9 * GIB, 5 * GIB)
    near = ParetoPoint(PLAIN, SearchStatus.PLANNED, 2.0, 5 * GIB, GIB)
    frontier = Frontier.of([far, near], 64)

    assert frontier.chosen is None
    assert frontier.points[0].choice == PLAIN
    assert not any(point.undominated for point in frontier.points)


def test_the_table_shows_the_best_and_says_what_it_leaves_out() -> None:
    worse = [
        ParetoPoint(other(microbatches=n), SearchStatus.PLANNED, 1.0 + n, 5 * GIB, bubble=0.3)
        for n in range(1, 40)
    ]
    text = plain_text(show_frontier(Frontier.of([BEST, *worse], 64)))
    rows = [line for line in text.splitlines() if "gpipe" in line or "1f1b" in line]

    assert rows[0].split()[:6] == ["*", "4", "4", "1f1b", "8", "none"]
    assert "64" in rows[0]
    assert "20.0%" in rows[0]
    assert rows[0].endswith("chosen")
    assert len(rows) == 16
    assert "24 further settings: 24 planned; all are in --json" in text


def test_json_has_throughput_and_reason() -> None:
    frontier = Frontier.of(
        [BEST, ParetoPoint(other(), SearchStatus.PLANNED, 2.0, 5 * GIB, bubble=0.6)], 64
    )
    first, second = frontier_document(frontier)["points"]

    assert (first["samples_per_s"], first["reason"]) == (64.0, "chosen")
    assert (second["samples_per_s"], second["schedule"]) == (32.0, "gpipe")
    assert second["reason"] == "2x slower: bubble 60%"


def test_a_plan_shows_what_it_was_chosen_from_on_every_way(plan: Plan) -> None:
    frontier = Frontier.of(
        [BEST, ParetoPoint(other(), SearchStatus.PLANNED, 2.0, 5 * GIB, bubble=0.6)], 64
    )
    chosen = dataclasses.replace(plan, frontier=frontier)

    for text in (format_plan(chosen), format_report(chosen)):
        assert "2x slower: bubble 60%" in text
    for text in (format_plan(plan), format_report(plan)):
        assert "best first" not in text
