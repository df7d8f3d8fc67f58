"""Bare graphs with too many places to cut: what is searched of them.

The truth is the brute force of tests/helpers/bare_brute.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

from bare_brute import Pipeline, Question, graphs, value
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler import BareGraph, BareSetting, Objective, ScheduleKind, plan_graph
from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut import ground
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.orders import topological_orders
from gpipe_compiler.runtime.schedule.choosing import orders_for


@st.composite
def questions(draw: st.DrawFn) -> Question:
    graph = draw(graphs(8))
    costless = draw(st.sets(st.sampled_from([op.name for op in graph.ops])))
    ops = [
        replace(op, forward_s=0, backward_s=0, weight_s=0) if op.name in costless else op
        for op in graph.ops
    ]
    asked = BareSetting(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from((ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1))),
        draw(st.sampled_from(Objective)),
        None,
        Link(draw(st.sampled_from((0.5, 4.0, 1e9))), draw(st.sampled_from((0.0, 0.5)))),
        prove=True,
    )
    return Question(BareGraph(tuple(ops), graph.edges), asked)


@settings(max_examples=60, deadline=None)
@given(questions())
def test_no_cut_along_a_single_order_is_better(q: Question) -> None:
    """For the longest stage, where all of these are looked at, and not all other places."""
    q = replace(q, asked=replace(q.asked, objective=Objective.BOTTLENECK, prove=False))
    graph = contract(q.graph.problem(training=True), q.asked.stages)
    least = math.inf
    for order in topological_orders(graph):
        for stages in range(1, min(q.asked.stages, graph.size) + 1):
            orders = orders_for(ScheduleKind.GPIPE, tuple(range(stages)), q.asked.microbatches)
            own = tuple(range(stages))
            pipe = Pipeline(q.machines(stages), own, own, orders)
            for ends in itertools.combinations(range(1, graph.size), stages - 1):
                cut = [0] * len(q.graph.ops)
                for place, node in enumerate(order):
                    for op in graph.members[node]:
                        cut[op] = sum(end <= place for end in ends)
                least = min(least, value(q, cut, pipe))

    with mock.patch.object(ground, "down_sets", return_value=None):
        plan = plan_graph(q.graph, q.asked)

    assert plan.value_s <= least * (1 + 1e-9)
