"""What devices hold at a time: by hand, and against a walk that adds up bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.runtime.schedule import forward_only, gpipe, one_f_one_b
from gpipe_compiler.runtime.schedule.actions import Compute, Phase, parse_order
from gpipe_compiler.runtime.schedule.joint import waiting
from gpipe_compiler.simulate.in_flight import loads


def rows(load) -> set[tuple[tuple[int, int], ...]]:  # type: ignore[no-untyped-def]  # a Load
    return {tuple((int(a), int(b)) for a, b in moment) for moment in load.counts}


def test_gpipe_holds_every_microbatch() -> None:
    assert [rows(load) for load in loads(gpipe(range(3), 8))] == [{((0, 8),)}] * 3


def test_one_f_one_b_holds_those_in_flight() -> None:
    found = loads(one_f_one_b(range(3), 8))

    assert [rows(load) for load in found] == [{((0, 3),)}, {((0, 2),)}, {((0, 1),)}]


def test_inference_holds_one() -> None:
    assert [rows(load) for load in loads(forward_only(range(2), 8))] == [{((0, 1),)}] * 2


def test_recomputing_holds_inputs_and_one_microbatch_whole() -> None:
    """GPipe's last micro-batch does not wait: beside the three others it is there whole, and so
    is each of those when its turn comes, with its own input beside it."""
    (load,) = loads(gpipe(range(1), 4), recompute=[0])

    assert rows(load) == {((3, 1),)}


def test_a_split_backward_lets_go_at_its_second_part() -> None:
    (load,) = loads((parse_order("0F0 0F1 0B0 0F2 0B1 0W0 0B2 0W1 0W2"),))

    assert rows(load) == {((0, 3),)}


def test_stages_of_a_device_are_counted_together() -> None:
    (load,) = loads((parse_order("0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1"),))

    assert rows(load) == {((0, 2), (0, 1))}
    assert rows(load.of(1)) == {((0, 1),)}
    assert load.peak([0, 0], [10, 1]) == 21


def test_joint_stages_are_held_whole() -> None:
    (load,) = loads(gpipe(range(1), 4, [0]), recompute=[0], joint=[0])

    assert rows(load) == {((0, 4),)}


@given(
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from([gpipe, one_f_one_b]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=4),
    st.sets(st.integers(0, 3)),
)
def test_peaks_are_those_of_a_walk_over_the_actions(schedule_stages, m, schedule, sizes, again):  # type: ignore[no-untyped-def]  # drawn
    """Two stages on each device."""
    placement = [stage // 2 for stage in range(2 * ((schedule_stages + 1) // 2))]
    orders = schedule(placement, m)
    for order, load in zip(orders, loads(orders, again), strict=True):
        peak, held = 0, dict[Compute, int]()
        waits = waiting(order)
        for action in order:
            key = Compute(action.stage, Phase.FORWARD, action.microbatch)
            small, whole = sizes[action.stage]
            remat = action.stage in again and (action.stage, action.microbatch) in waits
            if action.phase is Phase.FORWARD:
                held[key] = small if remat else whole
            elif remat:
                held[key] += whole
            peak = max(peak, sum(held.values()))
            if action.phase is Phase.BACKWARD:
                del held[key]
        own = [sizes[stage] for stage in load.stages]
        assert load.peak([a for a, _ in own], [b for _, b in own]) == pytest.approx(peak)
