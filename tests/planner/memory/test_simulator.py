"""Plays of traces written by hand, against sums worked out by hand and the closed facts.

GPipe holds every micro-batch at once, 1F1B at most min(M, p - i) of stage i of p (Narayanan et al.,
PipeDream, 2019), one that recomputes holds one whole and what the others received.
"""

from __future__ import annotations

import pytest
from hand_traces import GRADIENT, KEPT, TEMPORARY, VALUE, WEIGHT_GRADIENT, players

from gpipe_compiler.plan.memory_curve import (
    CATEGORIES,
    Category,
    DeviceMemory,
    MemoryPoint,
    PeakHolder,
)
from gpipe_compiler.planner.memory.job import MemoryRun
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import Own, SharedBuffer
from gpipe_compiler.runtime.schedule.choosing import orders_for
from gpipe_compiler.runtime.spec import Remat, ScheduleKind


def run(schedule: ScheduleKind, stages: int, m: int, remat: Remat = Remat.NONE) -> list[MemoryRun]:
    orders = orders_for(schedule, range(stages), m, ())
    return [player.run() for player in players(orders, m, remat)]


def of(found: MemoryRun, category: Category) -> int:
    return found.sizes[CATEGORIES.index(category)]


def test_one_stage_and_two_micro_batches_by_hand() -> None:
    """F0 keeps 1000; F1 takes 300 for a moment before it keeps its own 1000; the batch is not
    counted. In B1 (the first) 70 come while all 2000 are there; then 11 stay as the gradient."""
    (found,) = run(ScheduleKind.GPIPE, 1, 2)

    assert [(p.action, p.peak, p.after) for p in found.points] == [
        ("0F0", KEPT + TEMPORARY, KEPT),
        ("0F1", 2 * KEPT + TEMPORARY, 2 * KEPT),
        ("0B1", 2 * KEPT + GRADIENT, KEPT + WEIGHT_GRADIENT),
        ("0B0", KEPT + WEIGHT_GRADIENT + GRADIENT, WEIGHT_GRADIENT),
    ]
    assert (found.peak, found.action) == (2 * KEPT + TEMPORARY, "0F1")
    assert of(found, Category.ACTIVATIONS) == 2 * KEPT
    assert of(found, Category.TEMPORARIES) == TEMPORARY
    assert found.after[CATEGORIES.index(Category.GRADIENTS)] == WEIGHT_GRADIENT


def test_boundary_values_of_two_stages_by_hand() -> None:
    """The second stage, one micro-batch: it receives 8, computes, and sends 8 back."""
    _, second = run(ScheduleKind.GPIPE, 2, 1)

    assert [(p.action, p.peak, p.after) for p in second.points] == [
        ("1F0", VALUE + KEPT + TEMPORARY, KEPT),
        ("1B0", max(KEPT + GRADIENT, GRADIENT + VALUE + WEIGHT_GRADIENT), VALUE + WEIGHT_GRADIENT),
    ]
    assert sum(second.after) == WEIGHT_GRADIENT


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_gpipe_holds_all_micro_batches(stages: int, m: int) -> None:
    for found in run(ScheduleKind.GPIPE, stages, m):
        assert of(found, Category.ACTIVATIONS) == m * KEPT


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_1f1b_holds_as_many_as_stages_follow(stages: int, m: int) -> None:
    for stage, found in enumerate(run(ScheduleKind.ONE_F_ONE_B, stages, m)):
        assert of(found, Category.ACTIVATIONS) == min(m, stages - stage) * KEPT


@pytest.mark.parametrize("m", [2, 8])
def test_recomputing_holds_one_micro_batch_and_what_the_others_received(m: int) -> None:
    for stage, found in enumerate(run(ScheduleKind.GPIPE, 3, m, Remat.FULL)):
        assert of(found, Category.ACTIVATIONS) == KEPT
        if stage:
            assert of(found, Category.BOUNDARY) >= (m - 1) * VALUE


@pytest.mark.parametrize("schedule", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL])
def test_what_is_told_one_by_one_comes_to_the_same(schedule: ScheduleKind, remat: Remat) -> None:
    """The events of every storage: their highest sum is the peak, and all but gradients end."""
    orders = orders_for(schedule, range(3), 5, ())
    for stage, player in enumerate(players(orders, 5, remat)):
        now = most = 0
        alive: dict[int, int] = {}

        def hear(number: int, size: int, _: SharedBuffer | Own) -> None:
            nonlocal now, most
            if size < 0:
                now -= alive.pop(number)  # noqa: B023  # called within this turn of the loop
            else:
                assert number not in alive  # noqa: B023  # as above
                alive[number] = size  # noqa: B023  # as above
                now += size
                most = max(most, now)

        MemorySimulator(player.job, hear).run()
        assert most == player.run().peak
        assert sum(alive.values()) == WEIGHT_GRADIENT, stage


def test_a_device_goes_to_json_and_back() -> None:
    points = tuple(MemoryPoint(f"0F{n}", n * n % 7, 0) for n in range(1000))
    holder = PeakHolder("8 uint8", Category.ACTIVATIONS, "op", 8, 1, 0)
    memory = DeviceMemory(6, "0F2", tuple(range(8)), points, (holder,) * 20, (0,), (6,)).shortened()

    assert len(memory.points) == 160
    assert max(point.peak for point in memory.points) == 4
    assert DeviceMemory.from_fields(memory.to_fields()) == memory
