"""Settings that are found, compared with planning every one of them.

`every` plans each choice by itself, without any bound, and takes the best and the undominated set
by their definitions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import IN_PROCESS, Cluster, Device, Link
from gpipe_compiler.compile import silent
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.options import Auto, CompileOptions, Constraints, Policy, RematChoice
from gpipe_compiler.plan.fields import from_fields, own_fields
from gpipe_compiler.plan.pareto import EQUAL, Choice, Frontier, ParetoPoint, SearchStatus
from gpipe_compiler.planner import planner
from gpipe_compiler.planner import search as exploring
from gpipe_compiler.planner.cut_problem import problem_of
from gpipe_compiler.planner.memory_fit import remeasured
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import explore, planned
from gpipe_compiler.planner.search_space import (
    SearchSpace,
    WorkSums,
    choices,
    devices_to_explore,
    least_peak_bytes,
    least_step_s,
    spread,
    surely_fits,
)
from gpipe_compiler.report.comparisons import reason, row
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind
from gpipe_compiler.targets.planning import plan_as_asked, planner_of
from gpipe_compiler.text.units import format_bytes

AUTO = Auto.AUTO
BATCH = 4
ROOM = 10**9


def toy(memory: int, devices: int = 3, link: Link = IN_PROCESS) -> Cluster:
    cluster = Cluster.of(Device("toy", 1e9, 1e9, memory, 1e-7), link)
    return dataclasses.replace(cluster.sized(devices), endless=False)


class Branches(nn.Module):
    """Layers of unequal width, with a skip, so that no two cuts are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 32)
        self.skip = nn.Linear(16, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        y = self.third(torch.relu(self.second(y)))
        return self.last(torch.relu(y + self.skip(x)))


@pytest.fixture(scope="module")
def graph() -> gpc.Graph:
    target = torch.ones(BATCH, 4)
    loss = nn.functional.mse_loss
    return gpc.trace(Branches(), torch.ones(BATCH, 16), target=target, loss_fn=loss)


def all_of(planner: Planner, wish: SearchSpace, policy: Policy) -> list[ParetoPoint]:
    """Every choice, planned, with memory as the search has it."""
    found = []
    training = planner.graph.loss is not None
    for choice in choices(wish, BATCH // policy.data_parallel, policy, training=training):
        alone = dataclasses.replace(policy, schedule=choice.schedule, remat=choice.remat)
        try:
            plan = planner.plan(choice, alone, exact_memory=False)
            found.append(planned(choice, plan))
        except PlanError:
            continue
    return found


def wish_for(cluster: Cluster, remat: RematChoice = RematChoice.AUTO) -> SearchSpace:
    return SearchSpace.of(CompileOptions(AUTO, AUTO, schedule=AUTO, cluster=cluster, remat=remat))


@pytest.fixture(scope="module")
def every(graph: gpc.Graph) -> list[ParetoPoint]:
    """All points on three devices that hold anything."""
    cluster = toy(ROOM)
    return all_of(Planner(graph, cluster), wish_for(cluster), Policy())


def figures(points: Iterator[ParetoPoint] | list[ParetoPoint]) -> set[tuple[float, int]]:
    return {(point.step_s, point.peak_bytes) for point in points}


def undominated(points: list[ParetoPoint]) -> set[tuple[float, int]]:
    """By the definition, among those that fit."""
    known = figures([point for point in points if not point.over_bytes])
    return {
        (step, peak)
        for step, peak in known
        if not any((s <= step and p <= peak) and (s, p) != (step, peak) for s, p in known)
    }


def faster(one: ParetoPoint, other: ParetoPoint) -> bool:
    return one.step_s < other.step_s and one.peak_bytes <= other.peak_bytes


def check(found: exploring.Explored, truth: list[ParetoPoint]) -> None:
    """The chosen is the best that fits, the marked are the undominated, each reason is true."""
    points = found.frontier.points
    fitting = [point for point in truth if not point.over_bytes]
    chosen = found.frontier.chosen
    assert (chosen is not None) == bool(fitting)
    if chosen is None:
        return
    fastest = min(point.step_s for point in fitting)
    near = [point for point in fitting if point.step_s <= fastest * (1 + EQUAL)]
    assert chosen.peak_bytes == min(point.peak_bytes for point in near)
    assert found.plan.prediction.step_s == chosen.step_s
    marked = [point for point in points if point.undominated]
    assert figures(marked) == undominated(truth)
    assert len(marked) == len(figures(marked))
    known = {point.choice: point for point in truth}
    for point in points:
        if point.status is SearchStatus.PLANNED:
            # What is marked follows from all points, not from this one.
            assert dataclasses.replace(point, undominated=False) == known[point.choice]
        elif point.choice in known:
            assert point.status is not SearchStatus.REFUSED
            true = known[point.choice]
            assert true.step_s >= point.step_s * (1 - 1e-9)
            assert true.peak_bytes >= point.peak_bytes
            if point.status is SearchStatus.LARGER:
                assert true.over_bytes >= point.over_bytes > 0
            else:
                assert any(faster(one, true) for one in fitting)


@pytest.fixture
def as_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory as the search has it, also of the plan that is chosen."""
    monkeypatch.setattr(exploring, "remeasured", lambda plan, *_: plan)


@pytest.mark.usefixtures("as_searched")
class TestAgainstEverything:
    def test_with_room_for_all(self, graph: gpc.Graph, every: list[ParetoPoint]) -> None:
        cluster = toy(ROOM)
        found = explore(Planner(graph, cluster), wish_for(cluster), Policy())

        check(found, every)
        statuses = {point.status for point in found.frontier.points}
        assert SearchStatus.SLOWER in statuses  # bounds do spare work

    @pytest.mark.parametrize("share", [0.2, 0.6])
    def test_with_little_room(
        self, graph: gpc.Graph, every: list[ParetoPoint], share: float
    ) -> None:
        peaks = sorted(point.peak_bytes for point in every if point.choice.devices < 3)
        cluster = toy(peaks[int(share * len(peaks))], 2)
        planner, wish = Planner(graph, cluster), wish_for(cluster)
        found = explore(planner, wish, Policy())

        check(found, all_of(planner, wish, Policy()))
        assert any(point.over_bytes for point in found.frontier.points)

    def test_over_a_slow_link_fewer_devices_win(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM, 2, Link(1e6, 1e-3))
        planner, wish = Planner(graph, cluster), wish_for(cluster, RematChoice.NONE)
        found = explore(planner, wish, Policy())

        check(found, all_of(planner, wish, Policy()))
        assert found.frontier.points[0].choice.devices == 1

    @pytest.mark.slow
    def test_where_nothing_fits_the_nearest_is_first(self, graph: gpc.Graph) -> None:
        cluster = toy(1000)
        planner, wish = Planner(graph, cluster), wish_for(cluster)
        found = explore(planner, wish, Policy())

        assert not found.fits
        first = found.frontier.points[0]
        assert first.status is SearchStatus.PLANNED
        assert first.over_bytes == max(found.plan.prediction.device_bytes) - 1000
        # Not all are planned, so it may not be the very nearest.
        assert first.peak_bytes <= 1.05 * min(p.peak_bytes for p in all_of(planner, wish, Policy()))
        others = (
            point for point in found.frontier.points if point.status is not SearchStatus.REFUSED
        )
        assert all(point.over_bytes > 0 for point in others)

    def test_it_is_the_same_every_time(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM, 2)
        one, other = (
            explore(Planner(graph, cluster), wish_for(cluster), Policy()) for _ in range(2)
        )
        assert one.frontier == other.frontier
        assert dataclasses.replace(one.plan, graph=None) == dataclasses.replace(
            other.plan, graph=None
        )


class TestTrueMemory:
    @pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
    def test_what_is_chosen_truly_fits_or_is_told_not_to(
        self, graph: gpc.Graph, every: list[ParetoPoint], share: float
    ) -> None:
        peaks = sorted(point.peak_bytes for point in every if point.choice.devices < 3)
        memory = peaks[int(share * len(peaks))]
        cluster = toy(memory, 2)
        found = explore(Planner(graph, cluster), wish_for(cluster), Policy())

        plan = found.plan
        measured = remeasured(plan, Policy().counted_optimizer)
        assert plan.prediction.device_bytes == measured.prediction.device_bytes
        first = found.frontier.points[0]
        peak = max(plan.prediction.device_bytes)
        assert first.told_bytes == peak
        assert format_bytes(peak) in row(first, found.frontier).values()
        others = [
            p
            for p in found.frontier.points
            if p.status is SearchStatus.PLANNED and not p.exact_bytes
        ]
        assert all("~ " in "".join(row(point, found.frontier).values()) for point in others)
        assert found.fits == (max(plan.prediction.device_bytes) <= memory)
        assert plan.prediction.step_s == found.frontier.points[0].step_s


class TestBounds:
    def test_no_plan_is_better_than_its_bounds(
        self, graph: gpc.Graph, every: list[ParetoPoint]
    ) -> None:
        planner = Planner(graph, toy(ROOM))
        for point in every:
            prepared = planner.prepare(point.choice.microbatches, Policy())
            work = WorkSums.of(problem_of(prepared.facts), training=True)

            assert least_step_s(work, point.choice) <= point.step_s * (1 + 1e-9)
            assert least_peak_bytes(work, point.choice) <= point.peak_bytes
            if point.choice.remat is RematChoice.NONE:
                assert surely_fits(work, point.choice, ROOM)
                assert not surely_fits(work, point.choice, point.peak_bytes - 1)

    def test_the_bound_of_gpipe_is_its_step_where_stages_are_equal(self) -> None:
        # Two equal halves: 2 (1 + 2) + (4 - 1) (1 + 2) seconds.
        work = WorkSums(2.0, 4.0, 2.0, 1.0, 2.0, 3.0, 100, 50, 10)
        choice = Choice(2, 2, ScheduleKind.GPIPE, 4)
        assert least_step_s(work, choice) == pytest.approx(15.0)
        assert least_peak_bytes(work, choice) == (100 + 4 * 10) // 2


class TestChoices:
    def test_all_schedules_on_all_numbers_of_devices(self) -> None:
        found = set(choices(wish_for(toy(ROOM, 4)), 8, Policy(), training=True))

        assert Choice(4, 4, ScheduleKind.ZB_H1, 8, RematChoice.FULL) in found
        assert Choice(8, 4, ScheduleKind.ZBV, 4) in found
        assert Choice(16, 4, ScheduleKind.INTERLEAVED, 2) in found
        assert {c.microbatches for c in found} == {1, 2, 4, 8}
        assert {c.devices for c in found} == {1, 2, 3, 4}

    def test_exact_batchnorm_has_gpipe_only(self) -> None:
        policy = Policy(batchnorm=BatchNorm.EXACT)
        found = choices(wish_for(toy(ROOM)), 8, policy, training=True)
        assert {choice.schedule for choice in found} == {ScheduleKind.GPIPE}

    def test_inference_recomputes_nothing(self) -> None:
        found = choices(wish_for(toy(ROOM)), 8, Policy(), training=False)
        assert {(c.schedule, c.remat) for c in found} == {(ScheduleKind.GPIPE, RematChoice.NONE)}

    def test_what_is_given_is_kept(self) -> None:
        wish = SearchSpace.of(CompileOptions(4, 2, schedule=AUTO, cluster=toy(ROOM, 4)))
        found = choices(wish, 8, Policy(), training=True)

        assert {(c.stages, c.microbatches, c.remat) for c in found} == {(4, 2, RematChoice.NONE)}
        places = {choice.schedule: choice.devices for choice in found}
        assert places[ScheduleKind.ONE_F_ONE_B] == 4
        assert places[ScheduleKind.ZBV] == places[ScheduleKind.INTERLEAVED] == 2

    def test_the_default_is_what_the_model_takes(self) -> None:
        """BatchNorm after a global pooling cannot train on single samples."""
        layers = (nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.BatchNorm1d(4), nn.Flatten())
        graph = gpc.trace(
            nn.Sequential(*layers, nn.Linear(4, 2)),
            torch.randn(8, 2, 9),
            target=torch.randn(8, 2),
            loss_fn=nn.MSELoss(),
        )
        cluster = toy(10**9, 2)
        wish = SearchSpace.of(
            CompileOptions(AUTO, None, schedule=ScheduleKind.GPIPE, cluster=cluster)
        )
        points = explore(Planner(graph, cluster), wish, Policy()).frontier.points
        found = {point.choice.stages: point.choice.microbatches for point in points}
        assert found.keys() == {1, 2}
        assert all(stages <= count <= 4 for stages, count in found.items())

    @given(st.lists(st.integers(1, 10**6), min_size=1, unique=True), st.integers(2, 10))
    def test_a_spread_keeps_both_ends(self, numbers: list[int], most: int) -> None:
        found = spread(sorted(numbers), most)

        assert len(found) <= most
        assert {min(numbers), max(numbers)} <= set(found) <= set(numbers)
        assert list(found) == sorted(found)

    def test_devices_are_those_of_the_cluster_or_the_cores(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
        host = Cluster((Device("host", 1e9, 1e9, ROOM, 1e-6),), IN_PROCESS, endless=True)
        pooled = dataclasses.replace(host, pooled=True)

        assert devices_to_explore(toy(ROOM, 5), 2) == 2
        assert devices_to_explore(pooled, 2) == 3
        with pytest.raises(UsageError, match="how many host there are"):
            devices_to_explore(host, 1)


class TestExploration:
    def test_what_cannot_be_planned_says_why(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM)
        pinned = Planner(graph, cluster, constraints=Constraints(pins=(("second", 2),)))
        wish = SearchSpace.of(CompileOptions(AUTO, 4, schedule=ScheduleKind.GPIPE, cluster=cluster))
        found = explore(pinned, wish, Policy())

        statuses = {point.choice.stages: point for point in found.frontier.points}
        assert statuses[3].status is SearchStatus.PLANNED
        assert statuses[1].status is statuses[2].status is SearchStatus.REFUSED
        assert "--pin second=2" in reason(statuses[2], found.frontier)

    def test_where_nothing_can_be_planned_the_reason_is_the_error(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM, 2)
        planner = Planner(graph, cluster, constraints=Constraints(pins=(("second", 7),)))
        with pytest.raises(UsageError, match="--pin second=7"):
            explore(
                planner,
                SearchSpace.of(CompileOptions(AUTO, 4, schedule=AUTO, cluster=cluster)),
                Policy(),
            )

    def test_a_schedule_that_cannot_have_the_stages_is_refused(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM)
        wish = SearchSpace.of(CompileOptions(3, AUTO, schedule=ScheduleKind.ZBV, cluster=cluster))
        with pytest.raises(PlanError, match="no such stages"):
            explore(Planner(graph, cluster), wish, Policy())

    def test_time_that_is_up_is_told(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM)
        wish = SearchSpace.of(
            CompileOptions(AUTO, AUTO, schedule=ScheduleKind.GPIPE, cluster=cluster)
        )
        found = explore(Planner(graph, cluster), wish, Policy(), seconds=0.0)

        assert sum(point.status is SearchStatus.PLANNED for point in found.frontier.points) == 1
        late = [p for p in found.frontier.points if p.status is SearchStatus.NOT_REACHED]
        assert late
        assert found.fits
        assert reason(late[0], found.frontier) == "not looked at: time was up"

    def test_each_size_is_costed_once(
        self, graph: gpc.Graph, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = []
        costs = planner.costs_by_kind

        def counted(described: gpc.Graph, *args: object, **kwargs: object) -> object:
            sizes.append((described.batch_size, described.precision))
            return costs(described, *args, **kwargs)

        monkeypatch.setattr("gpipe_compiler.planner.planner.costs_by_kind", counted)
        cluster = toy(ROOM, 2)
        explore(Planner(graph, cluster), wish_for(cluster), Policy())
        assert sorted(sizes) == [(size, Precision.FP32) for size in (1, 2, 4)]

    def test_replicas_share_the_batch(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM, 4)
        policy = Policy(data_parallel=2)
        wish = SearchSpace.of(
            CompileOptions(
                AUTO,
                AUTO,
                schedule=ScheduleKind.GPIPE,
                cluster=cluster,
                data_parallel=policy.data_parallel,
                batchnorm=policy.batchnorm,
            )
        )
        found = explore(Planner(graph, cluster), wish, policy)

        assert {point.choice.devices for point in found.frontier.points} == {1, 2}
        assert max(point.choice.microbatches for point in found.frontier.points) == BATCH // 2


class TestFrontier:
    def test_it_goes_to_json_and_back_with_the_plan(self, graph: gpc.Graph) -> None:
        cluster = toy(ROOM)
        options = gpc.CompileOptions(
            stages=AUTO, microbatches=4, schedule=AUTO, cluster=cluster, validate=False
        )
        plan, frontier = plan_as_asked(planner_of(graph, options), options, silent)

        assert frontier is not None
        assert from_fields(Frontier, json.loads(json.dumps(own_fields(frontier)))) == frontier
        kept = gpc.Plan.from_json(plan.to_json()).frontier
        assert kept == plan.frontier
        assert kept is not None
        assert kept.chosen == frontier.chosen

    def test_shortened_it_keeps_what_is_marked(self, every: list[ParetoPoint]) -> None:
        whole = Frontier.of(every, BATCH)
        short = whole.shortened(2)

        assert short.points[:2] == whole.points[:2]
        marked = [point for point in whole.points if point.undominated]
        assert [point for point in short.points if point.undominated] == marked
        assert len(short.points) + short.omitted == len(whole.points)
