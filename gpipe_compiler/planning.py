"""Makes the Plan: checks what was asked, states the problem, cuts, schedules and predicts."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.cluster import Cluster
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.ir import Graph, StateKind, ValueKind
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.cut import MOST_DOWN_SETS, Cut, StepKind, cut
from gpipe_compiler.passes.cut_graph import Facts, StageTable, problem_of, tabulate
from gpipe_compiler.passes.cut_problem import CutProblem
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.mixing import mixing_ops
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.policy import Policy, RematChoice
from gpipe_compiler.prediction import in_flight, peak_bytes, predict
from gpipe_compiler.runtime.joint import joint_of
from gpipe_compiler.runtime.schedule import lower, prove
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.spec import BatchNorm, Crossing, Remat
from gpipe_compiler.simulate import StageTimes


def make_plan(
    graph: Graph,
    *,
    stages: int,
    microbatches: int,
    batch_size: int,
    cluster: Cluster,
    costs: Costs,
    policy: Policy = Policy(),  # noqa: B008  # frozen
    most_down_sets: int = MOST_DOWN_SETS,
) -> Plan:
    """The plan with the shortest simulated step that was found, one device per stage.

    Args:
        graph: annotated at the size of one micro-batch, as `costs` are; training when it has a
            loss, else inference.
        batch_size: samples of a mini-batch.
        most_down_sets: places to cut up to which the search is over all of them.

    The schedule is lowered and proved free of deadlock.

    Raises:
        UsageError: for no stages or no micro-batches.
        PlanError: when the batch does not split, or there are more stages than ops.
    """
    _check_sizes(graph, costs, microbatch_size(batch_size, microbatches))
    _check_outputs(graph, microbatches)
    training = graph.loss is not None
    step = StepKind(policy.schedule.value) if training else StepKind.INFERENCE
    facts = Facts.of(graph, costs)
    drafting = _Drafting(
        facts, problem_of(facts), step, stages, microbatches, cluster, most_down_sets
    )
    draft = drafting.choose(policy.remat if training else RematChoice.NONE)
    exact = policy.batchnorm is BatchNorm.EXACT and training and microbatches > 1
    joint = _joint(graph, draft.stages) if exact else ()
    _prove(graph, draft.stages, draft.table, drafting.orders, joint)
    return Plan(
        name=graph.name,
        stages=draft.stages,
        crossings=draft.table.crossings,
        schedule=policy.schedule,
        microbatches=microbatches,
        batch_size=batch_size,
        training=training,
        orders=drafting.orders,
        cluster=cluster,
        cost_source=costs.source,
        prediction=predict(graph, draft.stages, drafting.orders, draft.found, joint),
        batchnorm=policy.batchnorm,
        precision=policy.precision,
        joint=joint,
        graph=graph,
    )


@dataclass(frozen=True)
class _Draft:
    """A cut, and what its stages hold."""

    found: Cut
    table: StageTable
    stages: tuple[Stage, ...]

    @property
    def recompute(self) -> tuple[bool, ...]:
        """For every stage, whether it recomputes."""
        return tuple(stage.remat is Remat.FULL for stage in self.stages)

    def with_recompute(self, recompute: Sequence[bool]) -> _Draft:
        """The same stages, of which these recompute."""
        stages = tuple(
            dataclasses.replace(stage, remat=Remat.FULL if again else Remat.NONE)
            for stage, again in zip(self.stages, recompute, strict=True)
        )
        return dataclasses.replace(self, stages=stages)


@dataclass(frozen=True)
class _Drafting:
    """What every cut of a graph is made from."""

    facts: Facts
    problem: CutProblem
    step: StepKind
    count: int
    microbatches: int
    cluster: Cluster
    most_down_sets: int

    @cached_property
    def orders(self) -> Orders:
        """Each device's actions."""
        return self.step.orders(self.count, self.microbatches)

    def choose(self, choice: RematChoice) -> _Draft:
        """The cut into stages that recompute as asked.

        AUTO cuts as if nothing were recomputed. Where a stage does not fit its device it is to
        recompute, and the cut is made anew, until those that do not recompute fit. Of these cuts,
        each with as few stages that recompute as it needs, it takes the one with the shortest
        step among those that come closest to fitting. The lower bound stays that of stages which
        recompute nothing.
        """
        draft = self.cut((choice is RematChoice.FULL,) * self.count)
        if choice is not RematChoice.AUTO:
            return draft
        first = draft.found
        settled = []
        while True:
            needed = self._too_large(draft)
            settled.append(draft.with_recompute(needed))
            wanted = tuple(map(operator.or_, needed, draft.recompute))
            if wanted == draft.recompute:
                break
            draft = self.cut(wanted)
        best = min(settled, key=self._merit)
        proved = first.proved and best is settled[0] and not any(best.recompute)
        found = dataclasses.replace(best.found, lower_bound_s=first.lower_bound_s, proved=proved)
        return dataclasses.replace(best, found=found)

    def _merit(self, draft: _Draft) -> tuple[int, float]:
        """How far a draft is from fitting its devices, and its step; less is better."""
        expected = predict(self.facts.graph, draft.stages, self.orders, draft.found)
        memory = self.cluster.device.memory
        return sum(max(0, peak - memory) for peak in expected.peak_bytes), expected.step_s

    def _too_large(self, draft: _Draft) -> tuple[bool, ...]:
        """For every stage, whether it does not fit its device unless it recomputes."""
        plain = draft.with_recompute((False,) * self.count)
        flying = in_flight(self.orders, self.count)
        return tuple(
            peak_bytes(self.facts.graph, stage, count) > self.cluster.device.memory
            for stage, count in zip(plain.stages, flying, strict=True)
        )

    def cut(self, recompute: tuple[bool, ...]) -> _Draft:
        """The best cut found into stages of which these recompute."""
        found = cut(
            self.problem,
            stages=self.count,
            microbatches=self.microbatches,
            step=self.step,
            link=self.cluster.link,
            recompute=recompute,
            most_down_sets=self.most_down_sets,
        )
        pairs = zip(self.problem.nodes, found.stage_of, strict=True)
        stage_of = {node.name: stage for node, stage in pairs}
        table = tabulate(self.facts, stage_of, self.count)
        stages = tuple(
            _stage(self.facts, table, index, found.times[index]) for index in range(self.count)
        )
        return _Draft(found, table, stages).with_recompute(recompute)


def _check_sizes(graph: Graph, costs: Costs, size: int) -> None:
    """Raises UsageError when the graph or its costs are not those of a micro-batch."""
    if graph.batch_size != size or costs.batch_size != size:
        raise UsageError(
            f"the graph is annotated for {graph.batch_size} samples and costed for "
            f"{costs.batch_size}, but a micro-batch has {size}",
            hint="run passes.shapes.annotate and the costs at the size of a micro-batch",
        )


def _check_outputs(graph: Graph, microbatches: int) -> None:
    """Makes sure that the outputs of a batch are those of its micro-batches put together.

    Raises:
        PlanError: for an output such as the B x B similarities of all samples.
    """
    if microbatches == 1:
        return
    for name in graph.output_values:
        value = graph.values[name]
        if value.kind is ValueKind.TENSOR and not value.splittable:
            maker = graph.producer.get(name)
            raise PlanError(
                f"the output {name} of shape {value.shape} for {graph.batch_size} samples pairs "
                "samples with one another: micro-batches cannot give that of the batch",
                location=maker.source if maker else None,
                hint="return what has one row per sample, or compile with --microbatches 1",
            )


def _joint(graph: Graph, stages: Sequence[Stage]) -> tuple[int, ...]:
    """The stages that exact BatchNorm computes on the whole mini-batch."""
    whole = mixing_ops(graph) | effects(graph).state_writes.keys()
    found = joint_of(
        [not whole.isdisjoint(stage.ops) for stage in stages], random=bool(random_ops(graph))
    )
    return tuple(sorted(found))


def _prove(
    graph: Graph,
    stages: Sequence[Stage],
    table: StageTable,
    orders: Orders,
    joint: Sequence[int],
) -> None:
    """Makes sure that the schedule ends: nobody waits for ever, and everything read is there.

    Raises:
        DeadlockError, ScheduleError: of the runtime; a fault of this compiler, not of the user.
    """
    owners: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.state:
            if graph.state[name].requires_grad:
                owners.setdefault(name, []).append(stage.index)
    shared = {name: indices for name, indices in owners.items() if len(indices) > 1}
    placement = range(len(stages))
    programs = lower(orders, placement, table.crossings, shared, joint)
    prove(programs, placement, table.crossings, joint)


def microbatch_size(batch_size: int, microbatches: int) -> int:
    """Samples in a micro-batch.

    Raises:
        UsageError: for no micro-batches.
        PlanError: when the batch does not split evenly.
    """
    if microbatches < 1:
        raise UsageError(f"{microbatches} micro-batches: at least one is needed")
    if batch_size % microbatches:
        fitting = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        near = sorted(
            {
                max((c for c in fitting if c < microbatches), default=1),
                min((c for c in fitting if c > microbatches), default=batch_size),
            }
        )
        raise PlanError(
            f"a batch of {batch_size} samples does not split into {microbatches} micro-batches",
            hint=f"use {' or '.join(map(str, near))} micro-batches, or another batch size",
        )
    return batch_size // microbatches


def _stage(facts: Facts, table: StageTable, index: int, times: StageTimes) -> Stage:
    graph = facts.graph
    ops = table.ops[index]
    names = dict.fromkeys(name for op in ops for name in graph.op_of[op].states(graph.modules))
    if index == 0:
        names.update(dict.fromkeys(_unread(graph)))
    states = [graph.state[name] for name in names]
    received = [crossing for crossing in table.crossings if index in crossing.targets]
    return Stage(
        index=index,
        ops=ops,
        duplicates=table.duplicates[index],
        inputs=table.inputs[index],
        outputs=table.outputs[index],
        state=tuple(names),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        receive_bytes=_bytes(graph, received),
        gradient_bytes=_bytes(graph, [crossing for crossing in received if crossing.gradient]),
        parameter_bytes=sum(s.bytes for s in states if s.kind is StateKind.PARAMETER),
        parameter_count=sum(
            s.bytes // s.dtype.itemsize for s in states if s.kind is StateKind.PARAMETER
        ),
        saved_bytes=facts.saved.saved_bytes(ops) if graph.loss is not None else 0,
        input_bytes=sum(graph.values[name].bytes for name in table.inputs[index]),
    )


def _unread(graph: Graph) -> list[str]:
    """The parameters and buffers that no op reads: the model's state all the same, so kept."""
    read = {name for op in graph.ops for name in op.states(graph.modules)}
    return [
        name
        for name, state in graph.state.items()
        if name not in read and state.kind is not StateKind.CONSTANT
    ]


def _bytes(graph: Graph, crossings: Sequence[Crossing]) -> int:
    return sum(graph.values[crossing.value].bytes for crossing in crossings)
