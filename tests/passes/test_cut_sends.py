"""The search for the shortest longest stage, where values are sent to several later stages.

The truth is every assignment of the nodes to stages, and sums over the problem (`cut_brute.py`).
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from cut_brute import Measure, assignments
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.cluster import NO_LINK, Link
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.criteria import Sends
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.orders import down_sets
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem, Node, Traffic
from gpipe_compiler.passes.cut.search import search
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import Space
from gpipe_compiler.passes.cut.tables import tables
from gpipe_compiler.runtime.spec import ScheduleKind


def drawn(draw: random.Random, *, equal: bool) -> tuple[CutProblem, CutSetting]:
    """Most values have readers far apart; what a stage receives comes as fast from all others."""
    size, stages = draw.randint(4, 8), draw.randint(2, 4)
    nodes = tuple(Node(f"op{i}", draw.randint(0, 5), draw.randint(0, 5)) for i in range(size))
    values = []
    for producer in range(GRAPH_INPUT, size - 1):
        later = range(producer + 1, size)
        users = sorted(draw.sample(later, min(len(later), draw.randint(1, 4))))
        values.append(
            Traffic(f"v{producer}", producer, tuple(users), draw.randint(0, 6), draw.randint(0, 6))
        )
    speeds = [Link(draw.choice([0.5, 1.0, 4.0]), draw.choice([0.0, 0.5])) for _ in range(stages)]
    links = tuple(
        tuple(NO_LINK if a == b else speeds[0 if equal else max(a, b)] for b in range(stages))
        for a in range(stages)
    )
    setting = CutSetting.equal(ScheduleKind.GPIPE, stages, 2, speeds[0])
    setting = dataclasses.replace(setting, links=links, objective=Objective.BOTTLENECK)
    return CutProblem(nodes, tuple(values)), setting


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**48), st.booleans())
def test_it_finds_and_proves_the_shortest_longest_stage(seed: int, equal: bool) -> None:
    problem, setting = drawn(random.Random(seed), equal=equal)
    measure, order = Measure(problem, setting), tuple(range(setting.stages))

    def longest(stage_of: tuple[int, ...]) -> float:
        return measure.bottleneck(stage_of, order, measure.stages(stage_of, order))

    best = min((longest(a) for a in assignments(problem, setting.stages)), default=math.inf)
    graph = contract(problem.check(), setting.stages)
    masks = down_sets(graph, 10_000)
    assert masks is not None
    space = Space(graph, masks)
    device_order = DeviceOrder.of(setting, order, (), np.zeros(setting.stages))
    criterion = Sends.of(space, device_order)
    assert criterion is not None

    found = search(space, device_order, tables(space, device_order), criterion, math.inf)

    assert found.bound_s == pytest.approx(best, rel=1e-9)
    if found.chain is not None:
        stage_of = [0] * len(problem.nodes)
        for members, stage in zip(graph.members, space.stages_of(found.chain), strict=True):
            for node in members:
                stage_of[node] = int(stage)
        assert longest(tuple(stage_of)) == pytest.approx(best, rel=1e-9)


def test_links_that_differ_by_the_sender_are_not_for_it() -> None:
    problem, setting = drawn(random.Random(1), equal=True)
    near, far = Link(1.0, 0.0), Link(4.0, 0.0)
    links = ((NO_LINK, near, far), (near, NO_LINK, near), (far, near, NO_LINK))
    setting = dataclasses.replace(setting, stages=3, slots=setting.slots[:1] * 3, devices=3)
    setting = dataclasses.replace(setting, links=links)
    graph = contract(problem.check(), 3)
    device_order = DeviceOrder.of(setting, range(3), (), np.zeros(3))

    assert Sends.of(Space(graph, down_sets(graph, 10_000) or ()), device_order) is None
