"""Plays that jump over what repeats, against plays of every step.

A play that somebody listens to takes every step. Orders are random ones that a pipeline can run,
beside those of the schedules; the traces are those of a chain, of which some stages recompute.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from unittest import mock

import pytest
from hand_traces import players
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.memory.cycles import cycles_of
from gpipe_compiler.memory.job import DeviceJob
from gpipe_compiler.memory.simulator import MemorySimulator
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


def assert_the_same(job: DeviceJob) -> int:
    """Holds a play against that of every step; gives how many steps it took itself."""
    taken = 0
    step = MemorySimulator._step

    def counting(self: MemorySimulator, item: object) -> None:
        nonlocal taken
        taken += 1
        step(self, item)  # type: ignore[arg-type]  # as given

    with mock.patch.object(MemorySimulator, "_step", counting):
        found = MemorySimulator(job).run()
    whole = MemorySimulator(job, lambda *_: None).run()
    assert found == whole
    assert list(found.points) == list(whole.points)
    return taken


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


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL])
def test_the_middle_of_a_long_program_is_not_played(remat: Remat) -> None:
    stages, m = 4, 400
    orders = orders_for(ScheduleKind.ONE_F_ONE_B, range(stages), m, ())
    for player in players(orders, m, remat):
        assert assert_the_same(player.job) < len(player.job.steps) / 8


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 30))
def test_cycles_are_the_same_steps_further_on(more: list[int], m: int) -> None:
    ahead = tuple(sum(more[device:]) for device in range(len(more)))
    for player in players(chain_orders(ahead, m), m):
        steps = player.job.steps
        seen: Counter[int] = Counter()
        for found in cycles_of(steps):
            for place in range(found.start, found.start + found.period * (found.count - 1)):
                one, other = steps[place].action, steps[place + found.period].action
                assert str(one).split("[")[0].rstrip("0123456789") == (
                    str(other).split("[")[0].rstrip("0123456789")
                )
                if isinstance(one, Compute) and isinstance(other, Compute):
                    assert other.microbatch == one.microbatch + found.shift
                drops = [(n, d + found.shift) for n, d in steps[place].drops]
                assert list(steps[place + found.period].drops) == drops
            seen.update(range(found.start, found.start + found.period * found.count))
        assert all(count == 1 for count in seen.values())
        assert all(place < len(steps) for place in seen)


def test_a_step_that_is_another_ends_what_repeats() -> None:
    """A value that is let go later in one cycle than in the others."""
    (player,) = players(orders_for(ScheduleKind.ONE_F_ONE_B, range(1), 40, ()), 40)
    steps = list(player.job.steps)
    place = next(n for n, step in enumerate(steps) if step.drops and n > 30)
    moved = steps[place].drops
    steps[place] = dataclasses.replace(steps[place], drops=())
    later = steps[place + 3]
    steps[place + 3] = dataclasses.replace(later, drops=(*later.drops, *moved))
    job = dataclasses.replace(player.job, steps=tuple(steps))

    covered = [range(c.start, c.start + c.period * c.count) for c in cycles_of(steps)]
    assert not any(place in part for part in covered)
    assert_the_same(job)
