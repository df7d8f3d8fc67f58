"""What a plan says of whether a pipeline is worth it."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.stages import WholeModel
from gpipe_compiler.report.comparisons import WAY_COLUMNS, first_question, verdict, way_rows
from gpipe_compiler.report.html import format_report
from gpipe_compiler.report.text import format_plan, plain_text

MEMORY = 1_000_000


def whole(devices: int, step_s: float, peak: int = 1000, problem: str = "") -> WholeModel:
    return WholeModel(devices, step_s, step_s, peak, MEMORY, problem)


def beside(plan: Plan, one: WholeModel, three: WholeModel) -> Plan:
    return dataclasses.replace(plan, whole=(one, three))


TOO_LARGE = 2 * MEMORY


@pytest.mark.parametrize(
    ("one", "three", "told"),
    [
        (
            whole(1, 36.0),
            whole(3, 27.0),
            "The pipeline is the fastest: 2 times one device alone, 1.5 times data parallelism "
            "over 3 devices.",
        ),
        (
            whole(1, 36.0),
            whole(3, 12.0),
            "The pipeline is not needed: data parallelism over 3 devices is 1.5 times as fast.",
        ),
        (
            whole(1, 18.1),
            whole(3, 18.0),
            "The pipeline is not needed: one device alone is as fast.",
        ),
        (
            whole(1, 36.0),
            whole(3, 0.0, problem="a batch of 8 samples does not split over 3 replicas"),
            "The pipeline is the fastest: 2 times one device alone. Data parallelism over 3 "
            "devices cannot run it.",
        ),
        (
            whole(1, 36.0, TOO_LARGE),
            whole(3, 12.0, TOO_LARGE),
            "The pipeline is what makes it possible: the whole model does not fit on a device.",
        ),
        (
            whole(1, 36.0, TOO_LARGE),
            whole(3, 12.0),
            "The pipeline is not needed: data parallelism over 3 devices is 1.5 times as fast. "
            "One device alone cannot run it.",
        ),
    ],
)
def test_the_best_way_is_named_and_what_the_pipeline_buys(plan, one, three, told):
    """The plan's own step takes 18 s."""
    assert verdict(beside(plan, one, three)) == told


def test_a_pipeline_that_does_not_fit_is_not_recommended(plan):
    full = dataclasses.replace(
        plan, prediction=dataclasses.replace(plan.prediction, device_bytes=(TOO_LARGE, 1, 1))
    )
    assert not full.fits

    assert verdict(beside(full, whole(1, 36.0), whole(3, 27.0))) == (
        "The pipeline does not fit, and is not needed: data parallelism over 3 devices does it."
    )
    assert verdict(beside(full, whole(1, 36.0, TOO_LARGE), whole(3, 1.0, TOO_LARGE))) == (
        "Nothing fits: neither the whole model on a device, nor this pipeline."
    )


def test_a_row_for_each_way(plan):
    rows = way_rows(beside(plan, whole(1, 36.0), whole(3, 12.0, TOO_LARGE)))

    assert [tuple(row) for row in rows] == [WAY_COLUMNS] * 3
    assert [row["fits"] for row in rows] == ["yes", "no", "yes"]
    assert [row["step"] for row in rows] == ["36 s", "12 s", "18 s"]
    assert [row["devices"] for row in rows] == ["1", "3", "3"]


def test_a_reason_stands_in_place_of_figures(plan):
    rows = way_rows(beside(plan, whole(1, 36.0), whole(3, 0.0, problem="why \x1b[31m not")))

    assert rows[1]["fits"].startswith("no: why ")
    assert "\x1b" not in rows[1]["fits"]
    assert rows[1]["step"] == ""


def test_it_comes_first_in_the_plan_and_stands_in_the_report(plan):
    known = beside(plan, whole(1, 36.0), whole(3, 27.0))

    text = format_plan(known)
    assert text.index("is a pipeline worth it?") < text.index("stages (")
    assert verdict(known) in text
    assert verdict(known) in format_report(known)


def test_a_plan_of_one_device_does_not_ask(plan):
    assert plain_text(first_question(plan)) == ""
    assert verdict(plan) == ""
    assert "worth it" not in format_report(plan)
