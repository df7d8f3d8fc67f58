"""The sweep for wide graphs, against all cuts of small random graphs.

The truth is brute force over every assignment of nodes to stages, with times summed up here from
their definitions; of two-stage cuts the sweep promises the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.frontier import frontier
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem, Node, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import StageTimes

LINKS = st.sampled_from([Link(1e9, 0.0), Link(4.0, 0.0), Link(1.0, 0.5), Link(0.3, 0.0)])


@st.composite
def problems(draw: st.DrawFn, most: int = 8) -> CutProblem:
    size = draw(st.integers(2, most))
    nodes = tuple(
        Node(f"op{i}", float(draw(st.integers(0, 9))), float(draw(st.integers(0, 9))))
        for i in range(size)
    )
    values = []
    for producer in range(GRAPH_INPUT, size - 1):
        users = draw(st.sets(st.integers(producer + 1, size - 1), max_size=3))
        if users:
            back = 0 if producer == GRAPH_INPUT else draw(st.integers(0, 8))
            size_there = draw(st.integers(0, 8))
            values.append(Traffic(f"v{producer}", producer, tuple(sorted(users)), size_there, back))
    return CutProblem(nodes, tuple(values))


def assignments(problem: CutProblem, stages: int) -> Iterator[tuple[int, ...]]:
    edges = list(problem.edges())
    for stage_of in itertools.product(range(stages), repeat=len(problem.nodes)):
        if len(set(stage_of)) == stages and all(stage_of[a] <= stage_of[b] for a, b in edges):
            yield stage_of


def times_of(
    problem: CutProblem,
    stage_of: tuple[int, ...],
    link: Link,
    placement: Sequence[int] = range(9),
) -> list[StageTimes]:
    """Seconds of every stage; `update_s` stands for what it sends.

    Args:
        placement: the device of every stage; between those of one nothing is sent.
    """
    stages = max(stage_of) + 1
    receive, gradient, send = ([0.0] * stages for _ in range(3))
    for value in problem.values:
        source = 0 if value.producer == GRAPH_INPUT else stage_of[value.producer]
        for target in {stage_of[user] for user in value.consumers}:
            if placement[target] == placement[source]:
                continue
            receive[target] += link.seconds(value.bytes)
            gradient[target] += link.seconds(value.gradient_bytes)
            send[source] += link.seconds(value.bytes) + link.seconds(value.gradient_bytes)
    found = []
    for stage in range(stages):
        own = [n for n, its in zip(problem.nodes, stage_of, strict=True) if its == stage]
        forward, backward = sum(n.forward_s for n in own), sum(n.backward_s for n in own)
        found.append(
            StageTimes(forward, backward, receive[stage], gradient[stage], update_s=send[stage])
        )
    return found


def bottleneck(times: list[StageTimes]) -> float:
    return max(t.forward_s + t.backward_s + t.receive_s + t.gradient_s + t.update_s for t in times)


def family(problem: CutProblem, link: Link, speeds: tuple[float, ...] = (1.0,)) -> set[frozenset]:
    """The original nodes in each down-set of the sweep."""
    graph = contract(problem.check(), 2)
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, 1, link)
    device_order = DeviceOrder.of(setting, (0, 1), (), [0.0, 0.0])
    masks = frontier(graph, device_order, 100_000, speeds)
    return {
        frozenset(n for i, m in enumerate(graph.members) if mask >> i & 1 for n in m)
        for mask in masks
    }


@settings(max_examples=200, deadline=None)
@given(problems(), LINKS)
def test_the_sweep_holds_the_best_cut_into_two(problem: CutProblem, link: Link) -> None:
    """Of the cuts into two stages, the one whose longer stage is shortest."""
    cuts = list(assignments(problem, 2))
    if not cuts:
        return
    least = min(bottleneck(times_of(problem, cut, link)) for cut in cuts)

    found = family(problem, link)

    offered = [tuple(int(n not in inside) for n in range(len(problem.nodes))) for inside in found]
    assert set(offered) <= set(cuts)
    assert min(bottleneck(times_of(problem, cut, link)) for cut in offered) == pytest.approx(least)


@settings(max_examples=60, deadline=None)
@given(problems(), LINKS)
def test_no_down_set_of_the_sweep_rules_out_another(problem: CutProblem, link: Link) -> None:
    """By the rule as it stands in the module's docstring, on the masks that come out."""

    def crossing(inside: frozenset[int]) -> float:
        return sum(
            link.seconds(v.bytes) + link.seconds(v.gradient_bytes)
            for v in problem.values
            if (v.producer in inside or v.producer == GRAPH_INPUT)
            and not set(v.consumers) <= inside
        )

    def compute(inside: frozenset[int]) -> float:
        return sum(problem.nodes[n].forward_s + problem.nodes[n].backward_s for n in inside)

    for one, other in itertools.permutations(family(problem, link), 2):
        apart = abs(compute(one) - compute(other))
        assert crossing(one) + apart > crossing(other) - 1e-6


def test_few_are_asked_for() -> None:
    nodes = tuple(Node(f"op{i}", 1.0 + i % 7, 1.0) for i in range(40))
    values = tuple(Traffic(f"v{i}", i, (i + 1,), 1, 1) for i in range(39))
    graph = contract(CutProblem(nodes, values), 2)
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, 1, Link(1e9, 0.0))
    device_order = DeviceOrder.of(setting, (0, 1), (), [0.0, 0.0])

    assert 5 <= len(frontier(graph, device_order, 10, (1.0,))) <= 10
