"""The sweep and the certificate for wide graphs, against all cuts of small random graphs.

The truth is brute force over every assignment of nodes to stages, with times summed up here from
their definitions; of two-stage cuts the sweep promises the best, of all cuts the certificate
promises a bound, and where it says that nothing is better, the least there is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.cluster import NO_LINK, Link
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import program
from gpipe_compiler.passes.cut.certificate import CLOSE, certify
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.frontier import frontier
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem, Node, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import StageTimes, simulate

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


def value_of(
    problem: CutProblem, stage_of: tuple[int, ...], setting: CutSetting, link: Link
) -> float:
    times = times_of(problem, stage_of, link, setting.placement)
    if setting.objective is Objective.BOTTLENECK:
        return bottleneck(times)
    bare = [dataclasses.replace(t, update_s=0.0) for t in times]
    return simulate(setting.orders, bare).step_s


def setting_of(
    kind: ScheduleKind | None, stages: int, microbatches: int, link: Link, objective: Objective
) -> CutSetting:
    plain = CutSetting.equal(kind, stages, microbatches, link)
    return dataclasses.replace(plain, objective=objective)


def family(problem: CutProblem, link: Link, speeds: tuple[float, ...] = (1.0,)) -> set[frozenset]:
    """The original nodes in each down-set of the sweep."""
    graph = contract(problem.check(), 2)
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, 1, link)
    lineup = DeviceOrder.of(setting, (0, 1), (), [0.0, 0.0])
    masks = frontier(graph, lineup, 100_000, speeds)
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
    lineup = DeviceOrder.of(setting, (0, 1), (), [0.0, 0.0])

    assert 5 <= len(frontier(graph, lineup, 10, (1.0,))) <= 10


SCHEDULES = st.sampled_from([None, *ScheduleKind])


@settings(max_examples=120, deadline=None)
@given(
    problems(6), SCHEDULES, st.integers(2, 4), st.integers(1, 5), LINKS, st.sampled_from(Objective)
)
def test_no_cut_is_below_the_bound(
    problem: CutProblem,
    kind: ScheduleKind | None,
    stages: int,
    microbatches: int,
    link: Link,
    objective: Objective,
) -> None:
    """Whatever is known already: the best there is, or something half as long again.

    Also where the bound is raised from target to target, as in programs too large for whole
    numbers.
    """
    if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV):
        stages = 4
    setting = setting_of(kind, stages, microbatches, link, objective)
    if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV):
        setting = on_two_devices(setting, link)
    plain = problem.forward_only() if kind is None else problem
    if kind is ScheduleKind.INTERLEAVED and microbatches % 2:
        return  # it takes micro-batches in rounds of as many as there are devices
    values = [value_of(plain, cut, setting, link) for cut in assignments(plain, stages)]
    least = min(values, default=math.inf)
    if math.isinf(least) or least == 0:
        return

    for known, relaxed in itertools.product((least, 1.5 * least), (False, True)):
        with mock.patch.object(program, "MOST_ROWS", 0 if relaxed else 5_000):
            certificate = certify(problem, setting, known)

        assert certificate.bound_s <= least * (1 + 3 * CLOSE)
        assert certificate.bound_s <= known
        if certificate.stage_of is not None:
            edges = problem.edges()
            assert all(certificate.stage_of[a] <= certificate.stage_of[b] for a, b in edges)


def on_two_devices(setting: CutSetting, link: Link) -> CutSetting:
    row = range(2)
    links = tuple(tuple(NO_LINK if a == b else link for b in row) for a in row)
    return dataclasses.replace(setting, seats=setting.seats[:2], links=links, devices=2)


@settings(max_examples=80, deadline=None)
@given(
    problems(6),
    st.sampled_from([None, ScheduleKind.GPIPE]),
    st.integers(2, 3),
    st.integers(2, 5),
    LINKS,
)
def test_it_proves_steps_of_gpipe(
    problem: CutProblem, kind: ScheduleKind | None, stages: int, microbatches: int, link: Link
) -> None:
    """Where the program says the same as the simulator, the bound is the least there is."""
    setting = setting_of(kind, stages, microbatches, link, Objective.STEP)
    plain = problem.forward_only() if kind is None else problem
    values = [value_of(plain, cut, setting, link) for cut in assignments(plain, stages)]
    least = min(values, default=math.inf)
    if math.isinf(least) or least == 0:
        return

    assert certify(problem, setting, least).bound_s == least
    worse = certify(problem, setting, 1.5 * least)
    assert worse.bound_s == pytest.approx(least, rel=1e-5)
    assert worse.stage_of is not None
    assert value_of(plain, worse.stage_of, setting, link) == pytest.approx(least, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(problems(6), st.integers(2, 3), LINKS)
def test_it_proves_longest_stages_where_values_have_one_user(
    problem: CutProblem, stages: int, link: Link
) -> None:
    single = tuple(dataclasses.replace(v, consumers=v.consumers[:1]) for v in problem.values)
    problem = dataclasses.replace(problem, values=single)
    setting = setting_of(ScheduleKind.GPIPE, stages, 4, link, Objective.BOTTLENECK)
    values = [value_of(problem, cut, setting, link) for cut in assignments(problem, stages)]
    least = min(values, default=math.inf)
    if math.isinf(least) or least == 0:
        return

    assert certify(problem, setting, least).bound_s == least
    assert certify(problem, setting, 1.5 * least).bound_s == pytest.approx(least, rel=1e-5)


def test_fewer_stages_count_where_they_may() -> None:
    """Two ops between which it takes long: one stage is the best of at most two."""
    problem = CutProblem((Node("a", 1.0), Node("b", 1.0)), (Traffic("v", 0, (1,), 10),))
    setting = setting_of(None, 2, 4, Link(1.0, 0.0), Objective.BOTTLENECK)

    assert certify(problem, setting, 11.0).bound_s == pytest.approx(11.0)
    assert certify(problem, setting, 11.0, fewer=True).bound_s == pytest.approx(2.0)


def test_the_same_question_gets_the_same_answer() -> None:
    nodes = tuple(Node(f"op{i}", 1.0 + i * 7 % 5, 2.0 + i * 3 % 4) for i in range(24))
    values = tuple(Traffic(f"v{i}", i, (i + 1, min(i + 4, 23)), 1 + i % 3, 1) for i in range(22))
    problem = CutProblem(nodes, values)
    setting = setting_of(ScheduleKind.GPIPE, 4, 8, Link(2.0, 0.0), Objective.STEP)

    assert certify(problem, setting, 300.0) == certify(problem, setting, 300.0)


def test_what_it_may_not_work_out_stays_a_bound() -> None:
    nodes = tuple(Node(f"op{i}", 1.0 + i * 7 % 5, 2.0 + i * 3 % 4) for i in range(40))
    values = tuple(Traffic(f"v{i}", i, (i + 1, min(i + 4, 39)), 1 + i % 3, 1) for i in range(38))
    problem = CutProblem(nodes, values)
    setting = setting_of(ScheduleKind.GPIPE, 8, 8, Link(2.0, 0.0), Objective.BOTTLENECK)

    little = certify(problem, setting, 60.0, work=1).bound_s
    much = certify(problem, setting, 60.0).bound_s

    assert sum(n.forward_s + n.backward_s for n in nodes) / 8 * (1 - 1e-5) <= little <= much
