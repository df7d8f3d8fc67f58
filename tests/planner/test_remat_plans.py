"""Plans that recompute: predictions against arithmetic done here, choices against the others.

Times are compared with the definition: GPipe's step in closed form with a set-up of one forward
before every backward but the first. Peaks are added up from what the stages hold.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import LossChoice, Policy, RematChoice
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.plan import stage_times
from gpipe_compiler.planner.cut_problem import CutFacts
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.stage_table import tabulate
from gpipe_compiler.report.text import format_plan
from gpipe_compiler.runtime.spec import BatchNorm, Precision, Remat, ScheduleKind
from gpipe_compiler.simulate.in_flight import loads
from gpipe_compiler.simulate.step import simulate

LINK = Link(1e9, 1e-6)
M, K = 4, 3


class Bottlenecks(nn.Module):
    """Little goes from block to block; inside, one block keeps much more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh())
                for width in (64, 512, 64, 64)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]  # Sequential returns what it is given


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    return trace(Bottlenecks(), torch.randn(256, 4), loss=LossChoice.SUM_OF_SQUARES)


def planned(graph: Graph, policy: Policy, memory: int = 2**40, stages: int = K) -> Plan:
    """As the search has it: what devices truly take is told in `tests/planner/memory`."""
    device = dataclasses.replace(DEFAULT_HOST, memory=memory)
    planner = Planner(graph, Cluster.of(device, LINK))
    return planner.plan(planner.choose(stages, M, policy), policy, exact_memory=False)


def fixed_bytes(plan_: Plan, stage: int) -> int:
    """Weights and gradients: the model has nothing else."""
    return 2 * plan_.stages[stage].parameter_bytes


def test_a_step_that_recomputes_takes_what_the_closed_form_says(graph: Graph) -> None:
    made = planned(graph, Policy(remat=RematChoice.FULL, prove=True, cut_inside=0))

    times = stage_times(made)
    forward = [s for t in times for s in (t.receive_s, t.forward_s)]
    backward = [s for t in times for s in (t.backward_s, t.gradient_s)]
    pace = [s for t in times for s in (t.forward_s + t.backward_s, t.gradient_s)]
    step = sum(forward) + sum(backward) + (M - 1) * (max(forward) + max(pace)) + times[0].update_s
    assert made.prediction.step_s == pytest.approx(step)
    again = (M - 1) * sum(stage.forward_s for stage in made.stages)
    assert made.prediction.recompute == pytest.approx(again / (K * step))
    assert made.prediction.proved
    assert all(stage.remat is Remat.FULL for stage in made.stages)
    assert Plan.from_json(made.to_json()) == dataclasses.replace(made, graph=None)


def test_what_a_stage_that_recomputes_holds(graph: Graph) -> None:
    """Its inputs for every micro-batch that waits, and one micro-batch whole."""
    made = planned(graph, Policy(remat=RematChoice.FULL))

    assert made.graph is not None
    for stage, peak in zip(made.stages, made.prediction.peak_bytes, strict=True):
        shapes = [made.graph.values[name].shape for name in stage.inputs]
        taken = sum(4 * torch.Size(shape).numel() for shape in shapes)
        assert stage.input_bytes == taken > 0
        assert peak == fixed_bytes(made, stage.index) + (M - 1) * taken + stage.saved_bytes


def test_no_other_cut_that_recomputes_is_faster(graph: Graph) -> None:
    """Every cut of the chain of ops into two stages that recompute, simulated."""
    made = planned(graph, Policy(remat=RematChoice.FULL, cut_inside=0), stages=2)
    assert made.graph is not None
    costs = roofline(made.graph, made.devices[0])
    facts = CutFacts.of(made.graph, costs)
    free = [op.name for op in facts.kept if op.name not in facts.atoms.last_stage]
    steps = []
    for place in range(1, len(free) + 1):
        stage_of = {op.name: int(op.name not in free[:place]) for op in facts.kept}
        table = tabulate(facts, stage_of, 2)
        stages = tuple(
            dataclasses.replace(
                stage,
                forward_s=sum(costs.ops[name].forward_s for name in ops),
                backward_s=sum(costs.ops[name].backward_s for name in ops),
            )
            for stage, ops in zip(made.stages, table.ops, strict=True)
        )
        cut = dataclasses.replace(made, stages=stages, crossings=table.crossings)
        steps.append(simulate(made.orders, stage_times(cut)).step_s)

    assert len(steps) > 10
    assert made.prediction.step_s == pytest.approx(min(steps))


def test_auto_recomputes_nothing_where_all_fits(graph: Graph) -> None:
    none, auto = (
        planned(graph, Policy(remat=choice)) for choice in (RematChoice.NONE, RematChoice.AUTO)
    )

    assert auto == none
    assert auto.prediction.recompute == 0


@pytest.mark.parametrize("schedule", ScheduleKind)
def test_auto_recomputes_only_where_memory_is_short(graph: Graph, schedule: ScheduleKind) -> None:
    """Whatever devices hold: the plan fits, and one that recomputes would not fit without."""
    stages = 4 if schedule in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV) else K
    none, full = (
        planned(graph, Policy(schedule=schedule, remat=choice, cut_inside=0), stages=stages)
        for choice in (RematChoice.NONE, RematChoice.FULL)
    )
    most, least = max(none.prediction.device_bytes), max(full.prediction.device_bytes)
    assert least < most
    some = set()
    for memory in range(least + 100, most + 1, (most - least) // 5):
        auto = planned(
            graph, Policy(schedule=schedule, remat=RematChoice.AUTO, cut_inside=0), memory, stages
        )

        assert max(auto.prediction.device_bytes) <= memory
        for load in loads(auto.orders):
            held = [auto.stages[index] for index in load.stages]
            whole = sum(fixed_bytes(auto, index) for index in load.stages)
            whole += load.peak([0] * len(held), [stage.saved_bytes for stage in held])
            assert any(stage.remat is not Remat.NONE for stage in held) == (whole > memory)
        step_s = simulate(auto.orders, stage_times(auto)).step_s
        assert auto.prediction.step_s == pytest.approx(step_s)
        assert auto.prediction.lower_bound_s == none.prediction.lower_bound_s
        assert auto.prediction.step_s >= none.prediction.step_s
        if any(stage.remat is not Remat.NONE for stage in auto.stages):
            assert not auto.prediction.proved
        assert "too much" not in format_plan(auto)
        some.add(sum(stage.remat is not Remat.NONE for stage in auto.stages))
    assert some & set(range(1, stages))


def test_where_nothing_fits_the_plan_says_so(graph: Graph) -> None:
    auto = planned(graph, Policy(remat=RematChoice.AUTO), 1024)

    for stage in auto.stages:  # none would hold less if it recomputed what it does not
        again = (M - 1) * stage.input_bytes + stage.saved_bytes
        assert stage.remat is not Remat.NONE or M * stage.saved_bytes <= again
    peaks = auto.prediction.peak_bytes
    worst, least = max(peaks), min(peaks)
    text = format_plan(auto)
    assert least > 1024
    assert "too much for stages 0, 1, 2" in text
    assert f"{(worst - 1024) / 1024:.3g} KiB" in text


class Normalised(nn.Module):
    """BatchNorm in the first half alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]  # as above


def test_what_a_stage_holds_that_takes_the_batch_as_one() -> None:
    """It has all micro-batches whole for its backward, unless it recomputes in segments."""
    graph = trace(Normalised(), torch.randn(64, 4), loss=LossChoice.SUM_OF_SQUARES)
    exact = Policy(batchnorm=BatchNorm.EXACT)
    none = planned(graph, exact, stages=2)
    assert none.joint == (0,)

    auto = planned(graph, dataclasses.replace(exact, remat=RematChoice.AUTO), 1024, stages=2)
    full = planned(graph, dataclasses.replace(exact, remat=RematChoice.FULL), stages=2)

    assert [stage.remat for stage in auto.stages] == [Remat.SEGMENTS, Remat.FULL]
    running = 2 * 4 * 64 + 8
    whole = M * full.stages[0].saved_bytes
    assert full.prediction.peak_bytes[0] == fixed_bytes(full, 0) + running + whole
    for made in (none, auto, full):
        simulated = simulate(made.orders, stage_times(made), made.joint)
        assert made.prediction.step_s == simulated.step_s
        assert made.prediction.lower_bound_s <= planned(graph, Policy(), stages=2).prediction.step_s
        assert not made.prediction.proved


def test_inference_recomputes_nothing() -> None:
    graph = trace(Bottlenecks(), torch.randn(256, 4), training=False)

    made = planned(graph, Policy(remat=RematChoice.FULL))

    assert all(stage.remat is Remat.NONE for stage in made.stages)


def test_a_schedule_that_cannot_normalise_the_whole_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="the schedule 1f1b cannot do that") as error:
        Policy(schedule=ScheduleKind.ONE_F_ONE_B, batchnorm=BatchNorm.EXACT)
    assert "--schedule gpipe" in error.value.hint


def test_older_plans_are_read() -> None:
    """What was written before there was a choice is a plan without it."""
    graph = trace(nn.Linear(4, 4), torch.randn(4, 4), loss=LossChoice.SUM_OF_SQUARES)
    made = plan(graph, stages=1, microbatches=2, cluster=Cluster.of(DEFAULT_HOST, LINK))
    fields = json.loads(made.to_json())
    for name in ("batchnorm", "precision"):
        del fields[name]
    del fields["prediction"]["recompute"]
    for stage in fields["stages"]:
        del stage["remat"], stage["input_bytes"]

    old = Plan.from_json(json.dumps(fields))

    assert (old.batchnorm, old.precision) == (BatchNorm.MICRO, Precision.FP32)
    assert old.stages[0].remat is Remat.NONE
