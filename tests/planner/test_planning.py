"""Plans of small models: what is refused, what is predicted, what the stages hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.cut_problem import MicrobatchGraph
from gpipe_compiler.planner.planner import make_plan
from gpipe_compiler.planner.planning import microbatch_size, pipeline_devices
from gpipe_compiler.report.text import plain_text, summary_table
from gpipe_compiler.runtime.schedule import forward_only
from gpipe_compiler.runtime.schedule.choosing import devices_for
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import Lane, StageTimes, simulate

LINK = Link(1e9, 1e-6)
CLUSTER = Cluster.of(DEFAULT_HOST, LINK)
BATCH = 8


class Tied(nn.Module):
    """Embedding and output projection share their weight, which no two stages agree on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        h = h + self.second(self.first(h).relu())
        return F.linear(h, self.embed.weight)


def traced(training: bool = True) -> Graph:
    def loss_fn(output: Any, target: Any) -> torch.Tensor:
        return F.cross_entropy(output.transpose(1, 2), target)

    tokens = torch.randint(16, (BATCH, 5))
    loss = loss_fn if training else None
    subject = Subject("tied", Tied(), (tokens,), {}, tokens if training else None, loss, training)
    graph = trace_mode(subject, training)
    if not graph.example:
        signature = read_signature(subject, on_meta=False)
        found = zip(signature.inputs, signature.examples, strict=True)
        graph = graph.replace(example={source.name: tensor for source, tensor in found})
    return graph


def planned(
    stages: int, microbatches: int, schedule: ScheduleKind = ScheduleKind.GPIPE, **options: bool
) -> Plan:
    graph = annotate(traced(**options), microbatch_size(BATCH, microbatches))
    policy = Policy(schedule=schedule)
    devices = pipeline_devices(CLUSTER, stages, policy, training=graph.loss is not None)
    choice = Choice(stages, devices, schedule, microbatches)
    prepared = MicrobatchGraph.of(graph, [roofline(graph, DEFAULT_HOST)])
    return make_plan(CandidateBuilder.of(prepared, CLUSTER, choice, policy), BATCH)


@pytest.mark.parametrize("schedule", ScheduleKind)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_prediction_is_the_simulation_of_the_stages(
    schedule: ScheduleKind, stages: int
) -> None:
    plan = planned(stages, 4, schedule)

    assert plan.graph is not None
    size = {name: value.bytes for name, value in plan.graph.values.items()}

    def seconds(one: int, other: int, count: int) -> float:
        """Nothing moves between stages of a device."""
        return 0.0 if plan.placement[one] == plan.placement[other] else LINK.seconds(count)

    times = []
    for stage in plan.stages:
        received = [c for c in plan.crossings if stage.index in c.targets]
        state = [plan.graph.state[name] for name in stage.state]
        trained = sum(s.bytes for s in state if s.requires_grad)
        assert stage.state_bytes == sum(s.bytes for s in state) + trained
        # Plain SGD reads weight and gradient, and writes the weight.
        assert stage.update_s == pytest.approx(3 * trained / DEFAULT_HOST.memory_bandwidth)
        back = [c for c in received if c.gradient]
        times.append(
            StageTimes(
                stage.forward_s,
                stage.backward_s,
                sum(seconds(c.source, stage.index, size[c.value]) for c in received),
                sum(seconds(c.source, stage.index, size[c.value]) for c in back),
                weight_s=stage.weight_s,
                update_s=stage.update_s,
            )
        )
        assert stage.receive_bytes == sum(size[c.value] for c in received)
        assert stage.gradient_bytes == sum(size[c.value] for c in back)
    simulation = simulate(plan.orders, times)
    # The tied weight's gradient is summed after the last action of all owners.
    owners = [stage.index for stage in plan.stages if "embed.weight" in stage.state]
    shared_bytes = plan.graph.state["embed.weight"].bytes
    shared_s = sum(2 * seconds(owners[0], other, shared_bytes) for other in owners[1:])
    worked = [span for span in simulation.timeline if span.lane is Lane.DEVICE]
    ends = max(span.end_s for span in worked if span.action.stage in owners)
    update_s = max(times[owner].update_s for owner in owners) if len(owners) > 1 else 0.0
    step_s = max(simulation.step_s, ends + shared_s + update_s)
    busy = sum(simulation.busy_s) / (step_s * len(plan.orders))
    assert plan.prediction.shared_sum_s == pytest.approx(shared_s)
    assert plan.prediction.step_s == pytest.approx(step_s)
    assert plan.prediction.bubble == pytest.approx(1 - busy)
    bound_s = plan.prediction.lower_bound_s
    assert 0 < bound_s <= step_s * (1 + 1e-9)
    assert plan.prediction.gap == pytest.approx(step_s / bound_s - 1)
    read = Plan.from_json(plan.to_json())
    assert read.to_json() == plan.to_json()  # its shapes are those of the example
    read = dataclasses.replace(read, crossings=plan.crossings)
    assert read == dataclasses.replace(plan, graph=None)


def test_a_tied_weight_is_owned_by_every_stage_that_reads_it() -> None:
    plan = planned(3, 4)

    owners = [stage.index for stage in plan.stages if "embed.weight" in stage.state]
    assert owners[0] == 0
    assert len(owners) > 1
    assert plan.stages[0].parameter_count >= 16 * 8


def test_inference_has_no_way_back() -> None:
    plan = planned(2, 4, training=False)

    assert not plan.training
    assert plan.orders == forward_only((0, 1), 4)
    assert not any(crossing.gradient for crossing in plan.crossings)
    assert all(stage.backward_s == 0 and stage.saved_bytes == 0 for stage in plan.stages)


def test_one_f_one_b_keeps_less_than_gpipe() -> None:
    gpipe_plan, other = planned(2, 8), planned(2, 8, ScheduleKind.ONE_F_ONE_B)

    assert sum(other.prediction.peak_bytes) < sum(gpipe_plan.prediction.peak_bytes)


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(PlanError, match="a batch of 8 samples does not split into 3") as error:
        planned(2, 3)
    assert "use 2 or 4 micro-batches" in error.value.hint
    assert "runs batches of any size" in error.value.hint
    with pytest.raises(UsageError, match="0 micro-batches"):
        planned(2, 0)
    with pytest.raises(UsageError, match="0 stages"):
        planned(0, 2)
    with pytest.raises(PlanError, match="99 stages are more than the"):
        planned(99, 2)


class Similarities(nn.Module):
    """Returns a B x B matrix, as contrastive losses compare."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) @ self.right(x).T


def test_an_output_of_pairs_of_samples_is_refused() -> None:
    """No micro-batch has its pairs with the samples of another one; one micro-batch has all."""
    subject = Subject("pairs", Similarities(), (torch.rand(BATCH, 4),), training=False)
    graph = tracing.trace(subject)

    def planned_in(count: int) -> Plan:
        size = BATCH // count
        annotated = annotate(graph, size)
        prepared = MicrobatchGraph.of(annotated, [roofline(annotated, DEFAULT_HOST)])
        choice = Choice(2, 2, ScheduleKind.GPIPE, count)
        return make_plan(CandidateBuilder.of(prepared, CLUSTER, choice, Policy()), BATCH)

    with pytest.raises(PlanError, match="pairs samples with one another") as caught:
        planned_in(2)
    assert caught.value.location is not None
    assert planned_in(1).microbatches == 1


@pytest.mark.parametrize(
    ("gpus", "stages", "kind", "devices"),
    [
        (2, 4, ScheduleKind.GPIPE, 2),
        (3, 4, ScheduleKind.GPIPE, 2),
        (5, 4, ScheduleKind.GPIPE, 4),
        (3, 5, ScheduleKind.ONE_F_ONE_B, 1),
        (3, 8, ScheduleKind.INTERLEAVED, 2),
        (2, 6, ScheduleKind.ZBV, 2),
    ],
)
def test_as_many_gpus_of_this_machine_as_the_schedule_can_have(
    gpus: int, stages: int, kind: ScheduleKind, devices: int
) -> None:
    """Of those that somebody has named, all: or it is refused. ZBV has two stages a device."""
    here = Cluster((DEFAULT_HOST,) * gpus, LINK, places=gpus)
    policy = Policy(schedule=kind)

    assert pipeline_devices(here, stages, policy, training=True) == devices
    named = dataclasses.replace(here, places=None)
    assert pipeline_devices(named, stages, policy, training=True) == min(
        gpus, devices_for(kind, stages)
    )


class Remembers(nn.Module):
    """All its layers read a buffer that the forward writes at last."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(12)])
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.writes = writes
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) + self.seen
        if self.writes:
            self.seen.add_(x.detach().sum(0))  # ties its readers together
        return self.last(x)


@pytest.mark.parametrize("writes", [True, False])
def test_what_ties_most_of_the_work_together_is_told_with_its_line(writes: bool) -> None:
    x = torch.randn(BATCH, 8)
    model = Remembers(writes=writes)
    made = plan(
        trace(model, x, target=x, loss_fn=F.mse_loss), stages=3, microbatches=2, cluster=CLUSTER
    )
    text = plain_text(summary_table(made, None))

    if not writes:
        assert made.tied == ""
        assert "tied together" not in text
        return
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, code in enumerate(lines, 1) if "# ties its readers together" in code)
    assert "cannot be cut apart" in made.tied
    assert f"({Path(__file__).name}:{line})" in made.tied
    assert "tied together" in text
    assert str(Path(__file__).parent) not in text
