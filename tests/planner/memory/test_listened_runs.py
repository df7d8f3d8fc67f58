"""Runs whose every storage is heard of, against runs that add what an action comes to at once.

Orders are random ones that a pipeline can run, beside those of the schedules; the traces are those
of a chain, of which some stages recompute.
"""

from __future__ import annotations

import pytest
from hand_traces import players
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.planner.memory.job import DeviceJob
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import Own, SharedBuffer
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.schedule.choosing import devices_for, orders_for, placement_for
from gpipe_compiler.runtime.spec import Remat, ScheduleKind


def chain_orders(ahead: tuple[int, ...], microbatches: int) -> Orders:
    """A chain in which each device begins so many forwards before its first backward.

    At least one more than the next device does, so that none waits for ever.
    """
    orders = []
    for device, most in enumerate(ahead):
        first = min(most, microbatches)
        order = [Compute(device, Phase.FORWARD, m) for m in range(first)]
        for m in range(microbatches):
            order.append(Compute(device, Phase.BACKWARD, m))
            if first + m < microbatches:
                order.append(Compute(device, Phase.FORWARD, first + m))
        orders.append(tuple(order))
    return tuple(orders)


def assert_the_same(job: DeviceJob) -> None:
    """Holds a run against the sum of all storages that it is heard to take and free."""
    sizes: dict[int, int] = {}
    peak = 0

    def hear(number: int, size: int, what: SharedBuffer | Own) -> None:
        nonlocal peak
        if size < 0:
            del sizes[number]
        else:
            sizes[number] = size
        peak = max(peak, sum(sizes.values()))

    heard = MemorySimulator(job, hear).run()
    found = MemorySimulator(job).run()
    assert found == heard
    assert list(found.points) == list(heard.points)
    assert (found.peak, sum(found.after)) == (peak, sum(sizes.values()))


@pytest.mark.parametrize("schedule", ScheduleKind)
@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL])
@pytest.mark.parametrize("m", [4, 6, 20])
def test_schedules_come_to_the_same(schedule: ScheduleKind, remat: Remat, m: int) -> None:
    placement = placement_for(schedule, 4, devices_for(schedule, 4))
    orders = orders_for(schedule, placement, m, ())
    for player in players(orders, m, remat, placement):
        assert_the_same(player.job)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 40), st.booleans())
def test_random_orders_come_to_the_same(more: list[int], m: int, again: bool) -> None:
    ahead = tuple(sum(more[device:]) for device in range(len(more)))
    orders = chain_orders(ahead, m)
    for player in players(orders, m, Remat.FULL if again else Remat.NONE):
        assert_the_same(player.job)
