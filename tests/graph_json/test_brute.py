"""Plans of random bare graphs against every cut there is, into every number of stages allowed.

The truth is brute force of its own (tests/helpers/bare_brute.py).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from bare_brute import Pipeline, Question, TooManyError, graphs, least, value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe_compiler import BareSetting, Objective, ScheduleKind, plan_graph
from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.runtime.schedule.choosing import devices_for, orders_for, placement_for
from gpipe_compiler.runtime.schedule.gpipe import forward_only


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """A few devices of one or two kinds, on one or two hosts, some pairs joined otherwise."""
    bandwidths = st.sampled_from((0.5, 2.0, 16.0))
    count = draw(st.integers(1, 4))
    memories = st.sampled_from((30, 60, 10**6, 10**6))
    kinds = [
        Device(f"kind{i}", draw(st.sampled_from((1.0, 2.0, 3.0))), 1.0, draw(memories), 0.0)
        for i in range(2)
    ]
    devices = [kinds[draw(st.integers(0, 1))] for _ in range(count)]
    split = draw(st.integers(0, count))
    hosts = tuple(int(i >= split) for i in range(count)) if 0 < split < count else ()
    pairs = list(itertools.combinations(range(count), 2))
    special = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2)) if pairs else []
    return Cluster(
        tuple(devices),
        Link(draw(bandwidths), draw(st.sampled_from((0.0, 0.5)))),
        Link(draw(bandwidths), 1.0) if hosts else None,
        hosts,
        tuple((a, b, Link(draw(bandwidths), 0.25)) for a, b in special),
    )


@st.composite
def questions(draw: st.DrawFn, most: int) -> Question:
    graph = draw(graphs(most))
    asked = BareSetting(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from(ScheduleKind)),
        draw(st.sampled_from(Objective)),
        draw(st.sampled_from((None, None, True, False))),
        Link(draw(st.sampled_from((0.5, 4.0, 1e9))), draw(st.sampled_from((0.0, 0.0, 0.5)))),
        draw(st.sampled_from((math.inf, math.inf, 20, 40, 80))),
        prove=True,
    )
    if draw(st.booleans()):
        cluster = draw(clusters())
        asked = replace(asked, cluster=cluster, memory=math.inf, stages=min(asked.stages, 4))
    return Question(graph, asked)


def hold(q: Question) -> None:
    """The plan is as good as the best where it says so, and its bound never above the best."""
    try:
        best = least(q)
    except TooManyError:
        return
    if best == math.inf:
        with pytest.raises(PlanError):
            plan_graph(q.graph, q.asked)
        return

    plan = plan_graph(q.graph, q.asked)

    near = 1e-6 * max(1.0, best)
    assert plan.lower_bound_s <= best + near
    assert plan.value_s >= best - near
    cut_of = {name: stage for stage, names in enumerate(plan.stages) for name in names}
    cut = [cut_of[op.name] for op in q.graph.ops]
    kind = q.asked.schedule if q.training else ScheduleKind.GPIPE
    stages = len(plan.stages)
    machines = q.machines(devices_for(kind, stages))
    devices = min(devices_for(kind, stages), len(machines.devices))
    on = placement_for(kind, stages, devices)
    number = q.asked.microbatches
    orders = orders_for(kind, on, number) if q.training else forward_only(on, number)
    row = [0] * devices
    for stage, figure in enumerate(plan.figures):
        row[on[stage]] = figure.device
    pipe = Pipeline(machines, on, tuple(row), orders)
    for objective, said in (
        (Objective.STEP, plan.step_time_s),
        (Objective.BOTTLENECK, plan.bottleneck_s),
    ):
        own = replace(q, asked=replace(q.asked, objective=objective))
        assert said == pytest.approx(value(own, cut, pipe))
    if plan.proved:
        assert plan.value_s <= best + near
        assert plan.gap == 0
    elif plan.lower_bound_s:
        assert plan.gap == pytest.approx(plan.value_s / plan.lower_bound_s - 1)
    assert plan.proved, f"not proved: {plan.value_s} with the best {best}"


@settings(max_examples=30, deadline=None)
@given(questions(7))
def test_plans_are_the_best_there_are(q: Question) -> None:
    hold(q)


@pytest.mark.slow
@settings(max_examples=700, deadline=None, suppress_health_check=list(HealthCheck))
@given(questions(12))
def test_many_plans_are_the_best_there_are(q: Question) -> None:
    hold(q)
