"""Bounds without a search, compared with numbers worked out by hand."""

from __future__ import annotations

import numpy as np

from gpipe_compiler.passes.cut.choose import ways_before
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Traffic


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
