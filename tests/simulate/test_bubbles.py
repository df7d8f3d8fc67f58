"""Bubbles and activations of every schedule, for equal stages, against the published formulas.

F, B and W are the seconds of a stage's forward and of both parts of its backward; p devices, v
stages a device, m micro-batches. The bubble is what a step takes beyond the work of a device.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.runtime.schedule import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    orders_for,
    placement_for,
    zb_h1,
    zbv,
)
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.in_flight import loads
from gpipe_compiler.simulate.step import Simulation, StageTimes, simulate

SECONDS = st.integers(1, 9)
DEVICES = st.integers(1, 7)
MORE = st.integers(0, 12)


def simulated(orders: Orders, stages: int, f: int, b: int, w: int) -> Simulation:
    return simulate(orders, [StageTimes(f, b + w, weight_s=w)] * stages)


def held(orders: Orders) -> list[int]:
    """For every device, the most micro-batches held at a time, added up over its stages."""
    return [int(load.counts[:, :, 1].sum(axis=1).max()) for load in loads(orders)]


def dealt(p: int, v: int) -> tuple[int, ...]:
    return placement_for(ScheduleKind.INTERLEAVED, p * v, p)


def as_v(p: int) -> tuple[int, ...]:
    return placement_for(ScheduleKind.ZBV, 2 * p, p)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@given(p=DEVICES, m=st.integers(1, 12), f=SECONDS, b=SECONDS, w=SECONDS)
def test_gpipe_and_1f1b_wait_alike(schedule, p, m, f, b, w):  # type: ignore[no-untyped-def]  # drawn
    found = simulated(schedule(range(p), m), p, f, b, w)

    assert found.step_s == m * (f + b + w) + (p - 1) * (f + b + w)


def test_gpipe_holds_all_and_1f1b_those_in_flight() -> None:
    assert held(gpipe(range(4), 9)) == [9] * 4
    assert held(one_f_one_b(range(4), 9)) == [4, 3, 2, 1]
    assert held(one_f_one_b(range(4), 3)) == [3, 3, 2, 1]


@given(p=DEVICES, v=st.integers(2, 4), more=MORE, f=SECONDS, b=SECONDS)
def test_interleaved_divides_the_bubble(p, v, more, f, b):  # type: ignore[no-untyped-def]  # drawn
    """By v, for any number of micro-batches from p up: here F and B are those of a v-th."""
    m = p + more
    found = simulated(interleaved(dealt(p, v), m), p * v, f, b, 0)

    assert found.step_s == m * v * (f + b) + (p - 1) * (f + b)


@given(p=DEVICES, v=st.integers(2, 4), rounds=st.integers(2, 4))
def test_interleaved_holds_a_little_more_than_1f1b(p, v, rounds):  # type: ignore[no-untyped-def]  # drawn
    """1 + (p - 1) / (p v) times as much, on the device that holds the most."""
    found = held(interleaved(dealt(p, v), rounds * p))

    assert found == [(v - 1) * p + 2 * (p - 1 - device) + 1 for device in range(p)]
    assert max(found) / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@given(p=DEVICES, v=st.integers(2, 4), m=st.integers(1, 25))
def test_groups_that_do_not_come_out_even_hold_more(p, v, m):  # type: ignore[no-untyped-def]  # drawn
    """One micro-batch more for every stage but the last, once there are p groups."""
    group = -(-m // max(1, m // p))

    assert max(held(interleaved(dealt(p, v), m))) <= (v - 1) * group + 2 * (p - 1) + 1
    assert group <= p + 1 or m < p * p


@given(p=DEVICES, more=MORE, f=SECONDS, b=SECONDS, w=SECONDS)
def test_zb_h1_fills_the_bubble_with_weights(p, more, f, b, w):  # type: ignore[no-untyped-def]  # drawn
    """(p - 1)(F + B - W) where W is longer than neither F nor B, from p micro-batches on.

    Of a longer W only as much comes off: work to put off is not there before the first gradient,
    nor can it be done while others wait for one.
    """
    m = p + more
    found = simulated(zb_h1(range(p), m), p, f, b, w)

    assert found.step_s == m * (f + b + w) + (p - 1) * (f + b - min(f, b, w))


@given(p=DEVICES, m=st.integers(1, 15))
def test_zb_h1_holds_no_more_than_1f1b(p, m):  # type: ignore[no-untyped-def]  # drawn
    """On every device what 1F1B holds on its first one."""
    assert held(zb_h1(range(p), m)) == [min(m, p)] * p


@given(p=DEVICES, more=MORE, t=SECONDS)
def test_zbv_waits_for_the_first_micro_batch_alone(p, more, t):  # type: ignore[no-untyped-def]  # drawn
    """For F = B = W, from 2 p - 1 micro-batches on: (p - 1) F, and no device waits in between.

    No schedule on these stages takes less: the last device cannot start before that.
    """
    m = 2 * p - 1 + more
    found = simulated(zbv(as_v(p), m), 2 * p, t, t, t)

    assert found.step_s == m * 6 * t + (p - 1) * t
    for device in range(p):
        spans = [span for span in found.timeline if span.device == device]
        started, ended = min(s.start_s for s in spans), max(s.end_s for s in spans)
        assert started == device * t
        assert ended - started == m * 6 * t


@given(p=DEVICES, more=MORE, f=SECONDS, b=SECONDS, w=SECONDS)
def test_zbv_beats_1f1b_where_parts_are_not_equal(p, more, f, b, w):  # type: ignore[no-untyped-def]  # drawn
    m = 2 * p - 1 + more
    found = simulated(zbv(as_v(p), m), 2 * p, f, b, w)

    plain = simulated(one_f_one_b(range(p), m), p, 2 * f, 2 * b, 2 * w)
    assert found.step_s <= plain.step_s


@given(p=DEVICES, m=st.integers(1, 20))
def test_zbv_holds_no_more_than_1f1b(p, m):  # type: ignore[no-untyped-def]  # drawn
    """On every device at most what 1F1B holds on its first one, in halves of a device's stages."""
    found = held(zbv(as_v(p), m))

    assert max(found) <= 2 * min(m, p)
    if m >= 2 * p - 1:
        assert found == [2 * p] * p


@given(p=DEVICES, v=st.integers(1, 4), m=st.integers(1, 15), f=SECONDS)
def test_inference_takes_in_a_micro_batch_whenever_a_device_is_free(p, v, m, f):  # type: ignore[no-untyped-def]  # drawn
    """Every v units of time, wherever the stages are."""
    places = [placement_for(ScheduleKind.GPIPE, p * v, p)]
    if v > 1:
        places.append(dealt(p, v))
    if v == 2:
        places.append(as_v(p))
    for placement in places:
        found = simulated(forward_only(placement, m), p * v, f, 0, 0)
        assert found.step_s <= (m - 1) * v * f + p * v * f


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_one_device_never_waits(kind: ScheduleKind) -> None:
    orders = orders_for(kind, placement_for(kind, 2, 1), 5)

    assert simulated(orders, 2, 3, 4, 2).bubble == 0
