"""Makes the Plan: checks what was asked, states the problem, cuts, schedules and predicts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gpipe_compiler.cluster import Cluster
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.ir import Graph, StateKind, ValueKind
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.cut import MOST_DOWN_SETS, Cut, StepKind, cut
from gpipe_compiler.passes.cut_graph import Facts, StageTable, problem_of, tabulate
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.runtime.schedule import lower, prove
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.spec import Crossing, ScheduleKind
from gpipe_compiler.simulate import StageTimes, simulate


def make_plan(
    graph: Graph,
    *,
    stages: int,
    microbatches: int,
    batch_size: int,
    schedule: ScheduleKind,
    cluster: Cluster,
    costs: Costs,
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
    step = StepKind(schedule.value) if training else StepKind.INFERENCE
    facts = Facts.of(graph, costs)
    problem = problem_of(facts)
    found = cut(
        problem,
        stages=stages,
        microbatches=microbatches,
        step=step,
        link=cluster.link,
        most_down_sets=most_down_sets,
    )
    stage_of = {node.name: stage for node, stage in zip(problem.nodes, found.stage_of, strict=True)}
    table = tabulate(facts, stage_of, stages)
    orders = step.orders(stages, microbatches)
    made = tuple(
        _stage(facts, table, index, found.times[index], training) for index in range(stages)
    )
    _prove(graph, made, table, orders)
    return Plan(
        name=graph.name,
        stages=made,
        crossings=table.crossings,
        schedule=schedule,
        microbatches=microbatches,
        batch_size=batch_size,
        training=training,
        orders=orders,
        cluster=cluster,
        cost_source=costs.source,
        prediction=_predict(graph, made, orders, found),
        graph=graph,
    )


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


def _prove(graph: Graph, stages: Sequence[Stage], table: StageTable, orders: Orders) -> None:
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
    prove(lower(orders, placement, table.crossings, shared), placement, table.crossings)


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


def in_flight(orders: Orders, stages: int) -> tuple[int, ...]:
    """For every stage, the most micro-batches that wait for their backward at one time.

    One, where nothing comes back: a stage works on one micro-batch after the other.
    """
    most = [1] * stages
    for order in orders:
        for stage in {action.stage for action in order}:
            own = [action for action in order if action.stage == stage]
            if any(action.phase is Phase.BACKWARD for action in own):
                most[stage] = max(accumulate(map(_step, own)))
    return tuple(most)


def _step(action: Compute) -> int:
    return 1 if action.phase is Phase.FORWARD else -1


def _stage(facts: Facts, table: StageTable, index: int, times: StageTimes, training: bool) -> Stage:
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
        saved_bytes=facts.saved.saved_bytes(ops) if training else 0,
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


def _predict(graph: Graph, stages: Sequence[Stage], orders: Orders, found: Cut) -> Prediction:
    simulation = simulate(orders, found.times)
    training = graph.loss is not None
    peak = []
    for stage, flying in zip(stages, in_flight(orders, len(stages)), strict=True):
        states = [graph.state[name] for name in stage.state]
        gradients = sum(s.bytes for s in states if s.requires_grad) if training else 0
        peak.append(sum(s.bytes for s in states) + gradients + flying * stage.saved_bytes)
    return Prediction(
        step_s=simulation.step_s,
        bottleneck_s=max(stage.forward_s + stage.backward_s for stage in stages),
        bubble=simulation.bubble,
        lower_bound_s=found.lower_bound_s,
        proved=found.proved,
        peak_bytes=tuple(peak),
    )
