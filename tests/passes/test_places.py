"""The places beside a cut, held against all places of small graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut.contract import Contracted, contract
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.evaluator import Timing
from gpipe_compiler.passes.cut.orders import down_sets
from gpipe_compiler.passes.cut.places import WHOLE, Places
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind
from tests.passes.random_problems import LINKS, random_problem

STAGES = 3


def some_graph(draw: random.Random) -> Contracted:
    """That of a random problem, of which some contradict themselves."""
    while True:
        try:
            return contract(random_problem(draw, draw.randint(2, 9)).check(), STAGES)
        except PlanError:
            continue


def some_places(draw: random.Random) -> tuple[Places, list[int], DeviceOrder]:
    """The places of a random graph, all of its down-sets, and the devices."""
    setting = CutSetting.equal(ScheduleKind.GPIPE, STAGES, 4, draw.choice(LINKS))
    graph = some_graph(draw)
    timing = Timing.of(setting)
    order = DeviceOrder.of(setting, tuple(range(STAGES)), timing.held, timing.again)
    whole = (1 << graph.size) - 1
    every = [mask for mask in down_sets(graph, 10_000) or [] if mask != whole]
    return Places.of(graph, order), every, order


def crossing_s(graph: Contracted, order: DeviceOrder, mask: int) -> float:
    """Seconds to move what is made in a down-set and read outside, there and back."""
    link = order.rates[1].receives
    seconds = 0.0
    for value in graph.values:
        made = value.producer == GRAPH_INPUT or mask >> value.producer & 1
        if made and any(not mask >> user & 1 for user in value.consumers):
            seconds += value.receive_s(link) + value.gradient_s(link)
    return seconds


def work_s(graph: Contracted, mask: int) -> float:
    return float(sum(graph.least_s[node] for node in range(graph.size) if mask >> node & 1))


@pytest.mark.parametrize("seed", range(60))
def test_beside_a_place_are_all_that_one_node_tells_from_it(seed: int) -> None:
    places, every, _ = some_places(random.Random(seed))
    for mask in every:
        found = places.beside([mask], 10_000)
        assert found <= {*every, (1 << places.graph.size) - 1}
        assert {other for other in every if (mask ^ other).bit_count() == 1} <= found


@pytest.mark.parametrize("seed", range(60))
def test_of_many_those_that_cross_least_are_taken(seed: int) -> None:
    places, every, order = some_places(random.Random(seed))
    graph = places.graph
    unit = WHOLE / float(graph.least_s.sum() or 1.0)
    for mask in every:
        all_of_them = sorted(places.beside([mask], 10_000))
        if len(all_of_them) < 3:
            continue
        taken = places.beside([mask], 2)
        merit = [
            crossing_s(graph, order, other) + abs(work_s(graph, other) - work_s(graph, mask))
            for other in all_of_them
        ]
        least = np.flatnonzero(np.array(merit) <= min(merit) + 2 * graph.size / unit)
        assert taken & {all_of_them[index] for index in least.tolist()}
        nearest = min((mask ^ other).bit_count() for other in all_of_them)
        assert any((mask ^ other).bit_count() == nearest for other in taken)
