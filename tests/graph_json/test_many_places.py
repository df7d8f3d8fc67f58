"""Bare graphs with too many places to cut: what is merged first, and what is searched.

Ops that cost nothing, such as views and what nobody reads of a tuple, are merged with others. The
truth is the brute force of tests/helpers/bare_brute.py, which merges nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
from bare_brute import Pipeline, Question, graphs, value
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler import BareGraph, BareSetting, Objective, ScheduleKind, plan_graph
from gpipe_compiler.cluster import Link
from gpipe_compiler.graph_json.file import BareOp
from gpipe_compiler.passes.cut import ground
from gpipe_compiler.passes.cut.contract import contract, lean
from gpipe_compiler.passes.cut.orders import down_sets, topological_orders
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
    merged = lean(contract(q.graph.problem(training=True), q.asked.stages), keep=1, once=True)
    least = math.inf
    for order in topological_orders(merged):
        for stages in range(1, min(q.asked.stages, merged.size) + 1):
            orders = orders_for(ScheduleKind.GPIPE, tuple(range(stages)), q.asked.microbatches)
            own = tuple(range(stages))
            pipe = Pipeline(q.machines(stages), own, own, orders)
            for ends in itertools.combinations(range(1, merged.size), stages - 1):
                cut = [0] * len(q.graph.ops)
                for place, node in enumerate(order):
                    for op in merged.members[node]:
                        cut[op] = sum(end <= place for end in ends)
                least = min(least, value(q, cut, pipe))

    with mock.patch.object(ground, "down_sets", return_value=None):
        plan = plan_graph(q.graph, q.asked)

    assert plan.value_s <= least * (1 + 1e-9)


def test_what_nobody_reads_joins_its_maker() -> None:
    """Layers that return two values of which one is read: else each doubles the down-sets."""
    ops, edges = [], []
    for layer in range(12):
        for part, seconds, size in (("cell", 1, 3), ("output", 0, 2), ("state", 0, 2)):
            ops.append(BareOp(f"{part}{layer}", seconds, seconds, size, 0))
        edges += [(f"cell{layer}", f"output{layer}"), (f"cell{layer}", f"state{layer}")]
        edges += [(f"output{layer}", f"cell{layer + 1}")] * (layer < 11)
    problem = BareGraph(tuple(ops), tuple(edges)).problem(training=True)

    merged = lean(contract(problem, 4), keep=1, once=False)

    assert merged.size == 12
    assert down_sets(contract(problem, 4), 1000) is None
    assert len(down_sets(merged, 1000) or ()) == 13
    assert merged.seconds[0, 0].tolist() == pytest.approx([1.0] * 12)
