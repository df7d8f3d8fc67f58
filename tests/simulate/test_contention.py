"""Devices that slow each other down, against hand-worked timelines, and the plain simulation where
nothing slows down or everything always does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.runtime.schedule import gpipe, one_f_one_b
from gpipe_compiler.runtime.schedule.actions import parse_order
from gpipe_compiler.simulate.contention import simulate_sharing
from gpipe_compiler.simulate.step import StageTimes, simulate

SECONDS = st.integers(1, 20).map(lambda tenths: tenths / 10)
STAGES = st.lists(st.builds(StageTimes, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4)
SCHEDULES = st.sampled_from([gpipe, one_f_one_b])


def scaled(times: list[StageTimes], factor: float) -> list[StageTimes]:
    return [
        StageTimes(t.forward_s * factor, t.backward_s * factor, t.receive_s, t.gradient_s)
        for t in times
    ]


@given(STAGES, st.integers(1, 5), SCHEDULES)
def test_without_contention_it_is_the_plain_simulation(stages, m: int, schedule) -> None:  # type: ignore[no-untyped-def]  # drawn
    orders = schedule(range(len(stages)), m)

    expected = simulate(orders, stages)

    found = simulate_sharing(orders, stages, stages)

    assert found.step_s == pytest.approx(expected.step_s)
    assert found.busy_s == pytest.approx(expected.busy_s)


@settings(max_examples=50)
@given(STAGES, st.integers(1, 5), SCHEDULES, st.sampled_from([1.2, 1.5, 2.0]))
def test_a_step_lies_between_that_of_undisturbed_and_of_disturbed_devices(  # type: ignore[no-untyped-def]  # drawn
    stages, m: int, schedule, factor: float
) -> None:
    orders = schedule(range(len(stages)), m)
    slow = scaled(stages, factor)

    step_s = simulate_sharing(orders, stages, slow).step_s

    assert step_s >= simulate(orders, stages).step_s * (1 - 1e-9)
    assert step_s <= simulate(orders, slow).step_s * (1 + 1e-9)


def test_two_devices_by_hand() -> None:
    """Both compute between 1 and 3 at half speed: F1 on device 0 and F0 on device 1."""
    alone, together = [StageTimes(1.0)] * 2, [StageTimes(2.0)] * 2
    orders = (parse_order("0F0 0F1"), parse_order("1F0 1F1"))

    found = simulate_sharing(orders, alone, together)

    spans = {str(s.action): (s.start_s, s.end_s) for s in found.timeline}
    assert spans["0F0"] == pytest.approx((0, 1), abs=1e-3)
    assert spans["0F1"] == pytest.approx((1, 3), abs=2e-3)
    assert spans["1F0"] == pytest.approx((1, 3), abs=2e-3)
    assert spans["1F1"] == pytest.approx((3, 4), abs=3e-3)


def test_a_short_neighbour_disturbs_for_a_short_time() -> None:
    """Device 1 is at work for 1 s at half speed (0.5 s of work), beside 3 s of device 0."""
    orders = (parse_order("0F0 0F1"), parse_order("1F0 1F1"))
    alone = [StageTimes(3.0), StageTimes(0.5)]
    together = [StageTimes(6.0), StageTimes(1.0)]

    found = simulate_sharing(orders, alone, together)

    spans = {str(s.action): (s.start_s, s.end_s) for s in found.timeline}
    assert spans["1F0"] == pytest.approx((3, 4), abs=5e-3)
    assert spans["0F1"] == pytest.approx((3, 6.5), abs=5e-3)
    assert found.step_s == pytest.approx(7.0, abs=1e-2)


def test_three_devices_share_in_proportion() -> None:
    """With one of two others at work, half of the slow-down: speed is the mean of 1 and 1/2."""
    orders = (parse_order("0F0 0F1"), parse_order("1F0 1F1"), parse_order("2F0 2F1"))
    alone = [StageTimes(1.0), StageTimes(1.0), StageTimes(0.0)]
    together = [StageTimes(2.0), StageTimes(2.0), StageTimes(0.0)]

    found = simulate_sharing(orders, alone, together)

    assert found.step_s == pytest.approx(1 + 1 / 0.75 + 1, abs=5e-3)
