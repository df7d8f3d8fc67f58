"""Plans of bare graphs: what a plan says against sums over the graph that it was made for.

Random graphs that are right get stages that are consecutive down-sets, and figures that the
definitions give; the best of them is brute force over every assignment. Random graphs with
something spoiled get one error that names it, and never a traceback.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler import (
    BareGraph,
    BarePlan,
    BareSetting,
    Objective,
    ScheduleKind,
    parse_graph,
    plan_graph,
)
from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import ModelError


@st.composite
def documents(draw: st.DrawFn, most: int = 7) -> dict[str, Any]:
    """Graph files that are right; edges may point backward in the list of ops."""
    size = draw(st.integers(1, most))
    names = draw(st.permutations([f"op{i}" for i in range(size)]))
    backward = draw(st.booleans())
    numbers = st.integers(0, 9)
    ops = [
        {
            "name": f"op{i}",
            "forward_s": draw(numbers),
            "backward_s": draw(numbers) if backward else 0,
            "output_bytes": draw(st.sampled_from([0, 1, 2.5, 8])),
            "parameter_bytes": draw(numbers),
        }
        for i in range(size)
    ]
    pairs = list(itertools.combinations(names, 2))
    edges = draw(st.lists(st.sampled_from(pairs), max_size=10)) if pairs else []
    return {"ops": ops, "edges": [list(edge) for edge in edges]}


def bottleneck(graph: BareGraph, stages: list[list[str]], bandwidth: float) -> float:
    """From the definition: compute, and bytes in and out, forward and backward."""
    stage_of = {name: stage for stage, names in enumerate(stages) for name in names}
    seconds = [0.0] * len(stages)
    ways = 2 if any(op.backward_s > 0 for op in graph.ops) else 1
    for op in graph.ops:
        source = stage_of[op.name]
        seconds[source] += op.forward_s + op.backward_s
        targets = {stage_of[after] for before, after in graph.edges if before == op.name}
        for target in targets - {source}:
            seconds[source] += ways * op.output_bytes / bandwidth
            seconds[target] += ways * op.output_bytes / bandwidth
    return max(seconds)


def everything(graph: BareGraph, most: int) -> list[list[list[str]]]:
    """All cuts into at most so many stages."""
    names = [op.name for op in graph.ops]
    found = []
    for stage_of in itertools.product(range(most), repeat=len(names)):
        place = dict(zip(names, stage_of, strict=True))
        used = sorted(set(stage_of))
        if used == list(range(len(used))) and all(place[a] <= place[b] for a, b in graph.edges):
            found.append([[n for n in names if place[n] == stage] for stage in used])
    return found


def check(graph: BareGraph, plan: BarePlan, most: int) -> None:
    assert 1 <= len(plan.stages) <= most
    assert sorted(n for s in plan.stages for n in s) == sorted(op.name for op in graph.ops)
    stage_of = {name: stage for stage, names in enumerate(plan.stages) for name in names}
    position = {n: i for i, n in enumerate(n for names in plan.stages for n in names)}
    assert all(stage_of[a] <= stage_of[b] for a, b in graph.edges)
    assert all(position[a] < position[b] for a, b in graph.edges)
    assert plan.lower_bound_s <= plan.value_s
    assert plan.gap == pytest.approx(
        plan.value_s / plan.lower_bound_s - 1 if plan.lower_bound_s else 0
    )
    assert json.loads(plan.to_json())["stages"] == [list(names) for names in plan.stages]


@settings(max_examples=60, deadline=None)
@given(documents(6), st.integers(1, 4), st.sampled_from([0.5, 4.0, 1e9]))
def test_the_longest_stage_is_the_shortest_there_is(
    document: dict[str, Any], most: int, bandwidth: float
) -> None:
    graph = parse_graph(document)
    asked = BareSetting(
        most, 4, objective=Objective.BOTTLENECK, link=Link(bandwidth, 0.0), prove=True
    )

    plan = plan_graph(graph, asked)

    check(graph, plan, most)
    stages = [list(names) for names in plan.stages]
    assert plan.bottleneck_s == pytest.approx(bottleneck(graph, stages, bandwidth))
    least = min(bottleneck(graph, cut, bandwidth) for cut in everything(graph, most))
    assert plan.bottleneck_s == pytest.approx(least)
    assert plan.proved


@settings(max_examples=40, deadline=None)
@given(documents(6), st.integers(2, 4), st.sampled_from([0.5, 4.0, 1e9]))
def test_what_is_only_searched_in_part_is_bounded(
    document: dict[str, Any], most: int, bandwidth: float
) -> None:
    """As graphs with many places to cut are."""
    graph = parse_graph(document)
    asked = BareSetting(
        most, 4, objective=Objective.BOTTLENECK, link=Link(bandwidth, 0.0), prove=True
    )

    with (
        mock.patch("gpipe_compiler.passes.cut.choose.MOST_DOWN_SETS", 2),
        mock.patch("gpipe_compiler.passes.cut.ground.most_places", return_value=2),
    ):
        plan = plan_graph(graph, asked)

    check(graph, plan, most)
    least = min(bottleneck(graph, cut, bandwidth) for cut in everything(graph, most))
    assert plan.lower_bound_s <= least * (1 + 1e-9)
    assert plan.bottleneck_s >= least * (1 - 1e-9)
    if plan.proved:
        assert plan.bottleneck_s <= least * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(documents(6), st.integers(2, 6), st.sampled_from([0.5, 4.0, 1e9]))
def test_of_many_numbers_of_stages_some_are_looked_at(
    document: dict[str, Any], most: int, bandwidth: float
) -> None:
    graph = parse_graph(document)
    asked = BareSetting(most, 4, objective=Objective.BOTTLENECK, link=Link(bandwidth, 0.0))

    with mock.patch("gpipe_compiler.graph_json.plan.MOST_COUNTS", 1):
        plan = plan_graph(graph, asked)

    check(graph, plan, most)
    least = min(bottleneck(graph, cut, bandwidth) for cut in everything(graph, most))
    assert plan.lower_bound_s <= least * (1 + 1e-9)
    assert plan.bottleneck_s >= least * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(documents(), st.integers(1, 4), st.integers(1, 5), st.sampled_from(ScheduleKind))
def test_a_step_takes_what_its_devices_do(
    document: dict[str, Any], most: int, microbatches: int, schedule: ScheduleKind
) -> None:
    """No step is shorter than one micro-batch, or than the work of all on all devices."""
    graph = parse_graph(document)
    two_each = schedule in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV)
    if two_each and (most % 2 or len(graph.ops) < most or microbatches % 2):
        return

    plan = plan_graph(graph, BareSetting(most, microbatches, schedule, link=Link(4.0, 0.0)))

    check(graph, plan, most)
    whole = sum(op.forward_s + op.backward_s for op in graph.ops)
    devices = {figure.device for figure in plan.figures}
    assert plan.step_time_s >= microbatches * whole / len(devices) * (1 - 1e-9)
    stages = [list(names) for names in plan.stages]
    if not two_each:
        assert plan.bottleneck_s == pytest.approx(bottleneck(graph, stages, 4.0))


SPOILED = st.sampled_from(
    [math.nan, math.inf, -1, -0.5, None, "1", True, [], {}, 10**400, [["x"]], "\0"]
)


@settings(max_examples=200, deadline=None)
@given(documents(4), st.data())
def test_what_is_wrong_is_said(document: dict[str, Any], data: st.DataObject) -> None:
    document = copy.deepcopy(document)
    op = data.draw(st.sampled_from(document["ops"]))
    how = data.draw(st.sampled_from(["number", "lacks", "unknown", "twice", "edge", "circle"]))
    if how == "number":
        key = data.draw(st.sampled_from([key for key in op if key != "name"]))
        op[key] = data.draw(SPOILED)
        said = key
    elif how == "lacks":
        said = data.draw(st.sampled_from(sorted(op)))
        del op[said]
    elif how == "unknown":
        op["forwards_s"] = 1
        said = "is forward_s meant?"
    elif how == "twice":
        document["ops"].append(dict(op))
        said = "several ops are named"
    elif how == "edge":
        document["edges"].append([op["name"], "nobody"])
        said = "'nobody'"
    else:
        document["edges"].append([op["name"], op["name"]])
        said = "circle"

    with pytest.raises(ModelError) as raised:
        parse_graph(document)

    assert said in raised.value.problem


def test_the_same_graph_gets_the_same_plan() -> None:
    ops = [
        {
            "name": f"op{i}",
            "forward_s": 1 + i % 5,
            "backward_s": 1 + i % 3,
            "output_bytes": i % 7,
            "parameter_bytes": 0,
        }
        for i in range(24)
    ]
    edges = [[f"op{i}", f"op{j}"] for i in range(24) for j in (i + 1, i + 3) if j < 24]
    graph = parse_graph({"ops": ops, "edges": edges})

    one, other = (plan_graph(graph, BareSetting(4, 8, link=Link(4.0, 0.0))) for _ in range(2))

    assert one.stages == other.stages
    assert one.lower_bound_s == other.lower_bound_s


def test_stages_that_do_not_fit_bound_nothing() -> None:
    """In one stage the ops would take 4 s, but it holds too much; in two they take 12 s."""
    ops = [
        {"name": name, "forward_s": 1, "backward_s": 1, "output_bytes": 4, "parameter_bytes": 5}
        for name in ("first", "second")
    ]
    graph = parse_graph({"ops": ops, "edges": [["first", "second"]]})

    plan = plan_graph(graph, BareSetting(2, 1, link=Link(1.0, 0.0), memory=10, prove=True))

    assert plan.step_time_s == plan.lower_bound_s == 12
    assert plan.proved
