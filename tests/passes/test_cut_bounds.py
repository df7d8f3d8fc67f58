"""Bounds without a search, compared with numbers worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut.choose import cut, ways_before
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind


def test_what_comes_before_a_node_is_all_of_a_chain_and_a_path_of_branches() -> None:
    """0 -> (1, 2) -> 3 -> 4, and 5 from 0 that nothing needs but the caller."""
    nodes = tuple(Node(str(index), 1.0, 0.0, 0.0) for index in range(6))
    values = (
        Traffic("a", 0, (1, 2, 5), 1, 0),
        Traffic("b", 1, (3,), 1, 0),
        Traffic("c", 2, (3,), 1, 0),
        Traffic("d", 3, (4,), 1, 0),
    )
    graph = contract(CutProblem(nodes, values, last=frozenset({4})), 2)
    names = [graph.members[node][0] for node in range(graph.size)]
    seconds = np.array([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0][name] for name in names])

    found = dict(zip(names, ways_before(graph, seconds).tolist(), strict=True))

    assert found == {0: 0.0, 1: 1.0, 2: 1.0, 3: 7.0, 4: 15.0, 5: 1.0}


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_is_looked_for_wherever_one_takes_no_longer(seed: int) -> None:
    """A bound that rules out a limit at once is never above a cut there is."""
    draw = random.Random(seed)
    nodes = tuple(Node(str(n), draw.randint(1, 9), draw.randint(0, 9)) for n in range(6))
    values = tuple(Traffic(str(n), n, (n + 1,), draw.randint(0, 9), 1) for n in range(5))
    kind = draw.choice([None, ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1])
    setting = CutSetting.equal(kind, 3, draw.randint(1, 5), Link(2.0, draw.choice([0.0, 1.0])))
    problem = CutProblem(nodes, values)
    found = cut(problem, setting)

    again = cut(problem, setting, within_s=found.objective_s)

    assert again.stage_of == found.stage_of
    most = sum(node.forward_s + node.backward_s for node in nodes) / 3
    with pytest.raises(PlanError, match="no cut takes less"):
        cut(problem, setting, within_s=most * 0.99)
