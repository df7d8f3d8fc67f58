"""The simulation against closed formulas, by hand, and against itself in another form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.errors import PlanError
from gpipe_compiler.runtime.schedule import forward_only, gpipe, one_f_one_b
from gpipe_compiler.runtime.schedule.actions import parse_order
from gpipe_compiler.simulate.step import FEW, Lane, StageTimes, Steps, recomputed, simulate

SECONDS = st.integers(0, 20).map(lambda tenths: tenths / 10)
STAGES = st.lists(
    st.builds(StageTimes, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=6
)
MICROBATCHES = st.integers(1, 9)
SCHEDULES = st.sampled_from([gpipe, one_f_one_b, forward_only])


def fill_drain_time(times: Sequence[StageTimes], microbatches: int) -> float:
    """The step of GPipe, or of inference where backward takes no time, in closed form.

    Equal jobs pass a line of machines in sum + (M - 1) x slowest machine; the forward line is
    through before the backward line starts. Recomputing, which all but the first micro-batch to
    come back need, is a set-up between two jobs: it slows a machine down, but no job waits for it
    twice.
    """
    forward = [machine for t in times for machine in (t.receive_s, t.forward_s)]
    backward = [machine for t in times for machine in (t.backward_s, t.gradient_s)]
    pace = [machine for t in times for machine in (t.recompute_s + t.backward_s, t.gradient_s)]
    return (
        sum(forward)
        + sum(backward)
        + (microbatches - 1) * (max(forward, default=0.0) + max(pace, default=0.0))
    )


def one_f_one_b_bound(times: Sequence[StageTimes], microbatches: int) -> float:
    """A step of 1F1B (one stage a device) takes no less than this.

    For every stage s: the way of the first micro-batch to it; its w warm-up forwards, or the
    first micro-batch's round trip through the later stages, whichever is longer; the steady
    phase; the same at the end; and the way of the last gradient back to stage 0. Every stage but
    the last recomputes every micro-batch; while it waits for a gradient, that costs nothing.
    """
    stages = len(times)
    bound = 0.0
    way = 0.0  # to this stage's forward, and from its backward to the start
    rest = sum(t.forward_s + t.backward_s + t.receive_s + t.gradient_s for t in times)
    for index, t in enumerate(times):
        way += t.receive_s + t.gradient_s
        own = t.forward_s + t.backward_s
        rest -= own + t.receive_s + t.gradient_s
        again = t.recompute_s if index < stages - 1 and microbatches > 1 else 0.0
        both = t.backward_s + again
        warm = min(microbatches, stages - index)
        start = max(warm * t.forward_s + again, t.forward_s + rest)
        end = max(warm * both, t.backward_s + rest)
        if microbatches > warm:
            steady = (microbatches - warm) * (own + again) - again
            inner = start + steady + end
        else:
            inner = max(start + warm * both - again, warm * t.forward_s + end)
        port = (microbatches - 1) * max(t.receive_s, t.gradient_s, both)
        bound = max(bound, way + inner, way + own + rest + port)
        way += own
    return bound


@given(STAGES, MICROBATCHES)
def test_gpipe_takes_what_the_closed_form_says(stages: list[StageTimes], m: int) -> None:
    simulation = simulate(gpipe(range(len(stages)), m), stages)

    assert simulation.step_s == pytest.approx(fill_drain_time(stages, m))


@given(STAGES, MICROBATCHES)
def test_inference_takes_what_the_closed_form_says(stages: list[StageTimes], m: int) -> None:
    one_way = [StageTimes(s.forward_s, receive_s=s.receive_s) for s in stages]

    simulation = simulate(forward_only(range(len(stages)), m), one_way)

    assert simulation.step_s == pytest.approx(fill_drain_time(one_way, m))


@given(STAGES, MICROBATCHES)
def test_one_f_one_b_takes_at_least_its_bound(stages: list[StageTimes], m: int) -> None:
    simulation = simulate(one_f_one_b(range(len(stages)), m), stages)

    assert simulation.step_s >= one_f_one_b_bound(stages, m) * (1 - 1e-12)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 5), (4, 8), (8, 32)])
def test_equal_stages_have_the_published_bubble(schedule, p: int, m: int) -> None:  # type: ignore[no-untyped-def]  # parametrised
    """(p-1)(F+B) on every device, for GPipe and 1F1B alike."""
    forward, backward = 1.0, 2.0

    simulation = simulate(schedule(range(p), m), [StageTimes(forward, backward)] * p)

    assert simulation.step_s == pytest.approx((m + p - 1) * (forward + backward))
    idle_s = [simulation.step_s - busy_s for busy_s in simulation.busy_s]
    assert idle_s == pytest.approx([(p - 1) * (forward + backward)] * p)
    assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert one_f_one_b_bound([StageTimes(forward, backward)] * p, m) == simulation.step_s


@settings(max_examples=60)
@given(STAGES, MICROBATCHES, SCHEDULES)
def test_many_at_once_take_what_each_takes_alone(stages, m: int, schedule) -> None:  # type: ignore[no-untyped-def]  # drawn
    orders = schedule(range(len(stages)), m)
    slower = [
        StageTimes(
            2 * s.forward_s,
            s.backward_s,
            s.receive_s,
            3 * s.gradient_s,
            s.forward_s,
            s.backward_s / 2,
            s.receive_s,
        )
        for s in stages
    ]
    if schedule is forward_only:
        stages = [StageTimes(s.forward_s, 0.0, s.receive_s) for s in stages]
        slower = [StageTimes(s.forward_s, 0.0, s.receive_s) for s in slower]
    rows = [list(map(astuple, each)) for each in (stages, slower)]

    together = Steps(orders)(np.array(rows))

    assert together.tolist() == pytest.approx(
        [simulate(orders, stages).step_s, simulate(orders, slower).step_s]
    )
    assert Steps(orders)(np.array(rows * FEW)).tolist() == together.tolist() * FEW


def test_a_split_backward_and_updates_by_hand() -> None:
    """Weights while the gradient travels; the update of stage 1 while stage 0 still works."""
    orders = (parse_order("0F0 0F1 0B0 0B1 0W0 0W1"), parse_order("1F0 1B0 1F1 1B1 1W0 1W1"))
    stages = [
        StageTimes(1.0, 3.0, weight_s=2.0, update_s=0.5),
        StageTimes(1.0, 3.0, 1.0, 2.0, weight_s=1.0, update_s=4.0),
    ]

    simulation = simulate(orders, stages)
    ends = {
        (span.lane, str(span.action)): span.end_s
        for span in simulation.timeline
        if span.lane is not Lane.RECEIVE
    }

    assert ends[Lane.DEVICE, "1B0"] == 5.0
    assert ends[Lane.GRADIENT, "1B0"] == 7.0
    assert ends[Lane.DEVICE, "1B1"] == 8.0
    assert ends[Lane.DEVICE, "1W1"] == 10.0
    assert ends[Lane.UPDATE, "1W1"] == 14.0
    assert ends[Lane.DEVICE, "0B1"] == 11.0
    assert ends[Lane.DEVICE, "0W1"] == 15.0
    assert ends[Lane.UPDATE, "0W1"] == 15.5
    assert simulation.step_s == 15.5
    assert simulation.busy_s == (8.0, 8.0)
    assert Steps(orders)(np.array([list(map(astuple, stages))])).tolist() == [15.5]


def test_two_stages_by_hand() -> None:
    """Stage 1's port takes longer than anything else: F1 waits for it, gradients queue."""
    times = [StageTimes(1, 1), StageTimes(1, 1, receive_s=3, gradient_s=2)]

    simulation = simulate(gpipe((0, 1), 2), times)

    spans = {(s.lane, str(s.action)): (s.start_s, s.end_s) for s in simulation.timeline}
    assert spans == {
        (Lane.DEVICE, "0F0"): (0, 1),
        (Lane.DEVICE, "0F1"): (1, 2),
        (Lane.RECEIVE, "1F0"): (1, 4),
        (Lane.DEVICE, "1F0"): (4, 5),
        (Lane.RECEIVE, "1F1"): (4, 7),
        (Lane.DEVICE, "1F1"): (7, 8),
        (Lane.DEVICE, "1B1"): (8, 9),
        (Lane.GRADIENT, "1B1"): (9, 11),
        (Lane.DEVICE, "1B0"): (9, 10),
        (Lane.GRADIENT, "1B0"): (11, 13),
        (Lane.DEVICE, "0B1"): (11, 12),
        (Lane.DEVICE, "0B0"): (13, 14),
    }
    assert simulation.step_s == 14
    assert simulation.busy_s == (4, 4)
    assert simulation.bubble == pytest.approx(20 / 28)


def test_recomputing_by_hand() -> None:
    """Stage 1 recomputes 0 once its gradient of 1 is made, stage 0 while it waits for that of 0."""
    times = [StageTimes(1, 2, recompute_s=1), StageTimes(1, 2, recompute_s=1)]

    simulation = simulate(gpipe((0, 1), 2), times)

    spans = {(str(s.action), s.recompute): (s.start_s, s.end_s) for s in simulation.timeline}
    assert spans == {
        ("0F0", False): (0, 1),
        ("0F1", False): (1, 2),
        ("1F0", False): (1, 2),
        ("1F1", False): (2, 3),
        ("1B1", False): (3, 5),
        ("1B0", True): (5, 6),
        ("0B1", False): (5, 7),
        ("1B0", False): (6, 8),
        ("0B0", True): (7, 8),
        ("0B0", False): (8, 10),
    }
    assert simulation.step_s == 10
    assert simulation.busy_s == (7, 7)
    assert simulation.recompute_s == (1, 1)


def test_recomputing_under_one_f_one_b_by_hand() -> None:
    """The last stage recomputes nothing; stage 0 recomputes all, micro-batch 0 while it waits."""
    times = [StageTimes(1, 2, recompute_s=1), StageTimes(1, 2, recompute_s=1)]

    simulation = simulate(one_f_one_b((0, 1), 3), times)

    device = [
        [
            ("R" if s.recompute else s.action.phase.value, s.action.microbatch, s.start_s, s.end_s)
            for s in simulation.timeline
            if s.device == device
        ]
        for device in (0, 1)
    ]
    assert device[1] == [
        ("F", 0, 1, 2),
        ("B", 0, 2, 4),
        ("F", 1, 4, 5),
        ("B", 1, 5, 7),
        ("F", 2, 7, 8),
        ("B", 2, 8, 10),
    ]
    assert device[0] == [
        ("F", 0, 0, 1),
        ("F", 1, 1, 2),
        ("R", 0, 2, 3),
        ("B", 0, 4, 6),
        ("F", 2, 6, 7),
        ("R", 1, 7, 8),
        ("B", 1, 8, 10),
        ("R", 2, 10, 11),
        ("B", 2, 11, 13),
    ]
    assert simulation.step_s == 13
    assert simulation.recompute_s == (3, 0)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_what_need_not_be_recomputed(m: int) -> None:
    """GPipe's rule: all but the last micro-batch. 1F1B: nothing on the last stage."""
    assert {str(a) for a in recomputed(gpipe(range(2), m))} == {
        f"{s}B{k}" for s in range(2) for k in range(m - 1)
    }
    again = {str(a) for a in recomputed(one_f_one_b(range(2), m))}
    assert again == ({f"0B{k}" for k in range(m)} if m > 1 else set())


def test_two_stages_on_one_device_share_it() -> None:
    simulation = simulate(gpipe((0, 0), 2), [StageTimes(1, 2), StageTimes(3, 4)])

    assert simulation.step_s == 20
    assert simulation.bubble == 0


def test_an_order_that_never_ends_is_refused() -> None:
    orders = (parse_order("0B0 0F0"), parse_order("1F0 1B0"))

    with pytest.raises(PlanError, match="device 0 would wait for ever before 0B0"):
        simulate(orders, [StageTimes(1, 1)] * 2)
