"""Makes the Plan: checks what was asked, has the graph cut, and proves the schedule."""

from __future__ import annotations

import dataclasses

from gpipe_compiler.cluster import Cluster
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.ir import Graph, ValueKind
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.options import NO_CONSTRAINTS, Constraints, Policy, RematChoice
from gpipe_compiler.passes.cut.modules import opened
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.passes.footprint import update_s_per_byte
from gpipe_compiler.passes.remat import FEW, MANY
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.cut_problem import MicrobatchGraph
from gpipe_compiler.planner.memory_fit import choose_exactly, with_memory
from gpipe_compiler.planner.predict import Candidate, shared
from gpipe_compiler.runtime.schedule import lower, prove
from gpipe_compiler.runtime.schedule.actions import Programs
from gpipe_compiler.runtime.schedule.choosing import devices_for, placement_for
from gpipe_compiler.runtime.spec import ScheduleKind


@uncollected()
def make_plan(
    prepared: MicrobatchGraph,
    choice: Choice,
    policy: Policy,
    cluster: Cluster,
    batch_size: int,
    *,
    constraints: Constraints = NO_CONSTRAINTS,
    work: int = WORK,
    exact_memory: bool = True,
) -> Plan:
    """The plan with the shortest simulated step that was found.

    Args:
        prepared: training when it has a loss, else inference.
        choice: how many stages and micro-batches there are, and devices of the pipeline.
        policy: all the rest.
        batch_size: samples of a mini-batch.
        constraints: what the stages are to keep to.
        work: how much every cut may work out (`passes.cut.cut`).
        exact_memory: whether what the devices take is found out by tracing the stages, which
            torch must be able to run; else it is what the search counts (`in_flight`).

    The schedule is lowered and proved free of deadlock.

    Raises:
        UsageError: for no stages or no micro-batches, or constraints that cannot be met.
        PlanError: when the batch does not split, or there are more stages than ops.
    """
    graph = prepared.graph
    _check_annotated(
        prepared, microbatch_size(batch_size, choice.microbatches, policy.data_parallel)
    )
    _check_precision(graph, policy)
    _check_outputs(graph, choice.microbatches)
    training = graph.loss is not None
    setting = setting_for(cluster, choice, policy, training=training)
    cluster = cluster.sized(len(setting.seats))
    builder = CandidateBuilder.of(prepared, cluster, setting, policy, constraints, work)
    remat = choice.remat if training else RematChoice.NONE
    if exact_memory:
        exact = choose_exactly(builder, remat, policy.data_parallel)
        candidate, programs = exact.candidate, exact.layout.programs if training else None
        prediction = with_memory(candidate.prediction, exact.memory, choice.stages)
    else:
        candidate = builder.choose(remat)
        prediction, programs = candidate.prediction, None
    candidate = _with_frontiers(builder, candidate, remat)
    graph = builder.facts_of(candidate).graph
    _prove(graph, candidate, setting, programs)
    return Plan(
        name=graph.name,
        stages=candidate.stages,
        crossings=candidate.table.crossings,
        schedule=choice.schedule,
        microbatches=choice.microbatches,
        batch_size=batch_size,
        training=training,
        orders=candidate.orders,
        cluster=cluster,
        cost_source="; ".join(dict.fromkeys(cost.source for cost in prepared.costs)),
        prediction=prediction,
        batchnorm=policy.batchnorm,
        precision=policy.precision,
        joint=candidate.joint,
        placement=setting.placement,
        seats=candidate.found.seats,
        constraints=constraints,
        replicas=policy.data_parallel,
        tied=builder.facts.tied([stage.ops for stage in candidate.stages]),
        cut_inside=policy.cut_inside,
        opened=_opened(builder, candidate),
        graph=graph,
    )


def _with_frontiers(
    builder: CandidateBuilder, candidate: Candidate, choice: RematChoice
) -> Candidate:
    """The same, with every stage's frontier of time against memory; for a plan to be used.

    Args:
        choice: what it was chosen from. Where that was no frontier, this one is for people to look
            at, and found among fewer places.
    """
    if builder.facts.graph.loss is None or builder.work < WORK:
        return candidate
    stages, most = list(candidate.stages), MANY if choice is RematChoice.AUTO else FEW
    for device, order in enumerate(candidate.orders):
        kind = builder.kind(candidate, device)
        known = builder.remats.all(candidate.stages, order, candidate.joint, kind, most)
        for stage in known.stages:
            frontier = known.frontier(stage.index)
            stages[stage.index] = dataclasses.replace(stages[stage.index], frontier=frontier)
    return dataclasses.replace(candidate, stages=tuple(stages))


def _opened(builder: CandidateBuilder, candidate: Candidate) -> tuple[str, ...]:
    """The modules that lie in several stages, of those that count."""
    found = opened(builder.facts.modules, candidate.found.stage_of)
    return tuple(dict.fromkeys(module.path for module in found if module.depth))


def _check_annotated(prepared: MicrobatchGraph, size: int) -> None:
    """Raises UsageError when the graph or its costs are for another size of micro-batch."""
    samples = prepared.graph.batch_size
    for costs in prepared.costs:
        if samples != size or costs.batch_size != size:
            raise UsageError(
                f"the graph is annotated for {samples} samples and costed for "
                f"{costs.batch_size}, but a micro-batch has {size}",
                hint="run passes.shapes.annotate and the costs at the size of a micro-batch",
            )


def _check_precision(graph: Graph, policy: Policy) -> None:
    """Raises UsageError when the graph is for another precision."""
    if graph.precision is not policy.precision:
        raise UsageError(
            f"the graph is annotated for {graph.precision.value}, but the plan is to be for "
            f"{policy.precision.value}",
            hint="run passes.shapes.annotate and the costs in the precision of the policy",
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


def _prove(
    graph: Graph, candidate: Candidate, setting: CutSetting, programs: Programs | None
) -> None:
    """Makes sure that the schedule ends: nobody waits for ever, and everything read is there.

    Args:
        programs: of the devices, where they are known.

    Raises:
        DeadlockError, ScheduleError: of the runtime; a fault of this compiler, not of the user.
    """
    placement, crossings = setting.placement, candidate.table.crossings
    if programs is None:
        owners = dict(shared(graph, candidate.stages))
        programs = lower(candidate.orders, placement, crossings, owners, candidate.joint)
    prove(programs, placement, crossings, candidate.joint)


def setting_for(cluster: Cluster, choice: Choice, policy: Policy, *, training: bool) -> CutSetting:
    """What a cut of a choice is for, in which nothing is recomputed.

    Raises:
        UsageError: when there are too few devices for the replicas.
        PlanError: when the schedule cannot have so many stages.
    """
    kind = choice.schedule if training else None
    devices = choice.devices
    replicas = policy.data_parallel
    cluster = cluster.sized(devices)
    there = len(cluster.devices) if cluster.endless else devices_there(cluster, replicas)
    kinds = cluster.kinds
    numbers = range(there)
    seats = []
    for number in numbers:
        device = cluster.devices[number]
        # The devices of the same rank in all replicas reduce gradients with one another.
        peer = cluster.link
        if not cluster.endless and replicas > 1:
            peer = cluster.between(number, number + there)
        rate = update_s_per_byte(device, policy.counted_optimizer, replicas, peer)
        seats.append(
            DeviceSlot(
                kinds.index(device),
                device.memory,
                cluster.host(number),
                rate if training else 0.0,
                peer.latency_s * (replicas > 1) if training else 0.0,
            )
        )
    links = tuple(tuple(cluster.between(a, b) for b in numbers) for a in numbers)
    return CutSetting(
        kind,
        choice.stages,
        choice.microbatches,
        tuple(seats),
        links,
        min(devices, there),
        objective=policy.objective,
    )


def pipeline_devices(cluster: Cluster, stages: int, policy: Policy, *, training: bool) -> int:
    """How many devices a pipeline of so many stages has: as its schedule needs, if there are.

    Raises:
        UsageError: for no stages, or when there are too few devices for the replicas.
        PlanError: when the schedule cannot have so many stages.
    """
    if stages < 1:
        raise UsageError(f"{stages} stages: at least one is needed")
    kind = policy.schedule_kind if training else ScheduleKind.GPIPE
    try:
        wanted = devices_for(kind, stages)
    except ValueError as error:
        raise PlanError(str(error)) from error
    if cluster.endless:
        return wanted
    there = min(wanted, devices_there(cluster, policy.data_parallel))
    if cluster.places is None:
        return there
    # Nobody has asked for all the GPUs of this machine.
    return next((n for n in range(there, 0, -1) if _goes_on(kind, stages, n)), there)


def _goes_on(kind: ScheduleKind, stages: int, devices: int) -> bool:
    try:
        placement_for(kind, stages, devices)
    except ValueError:
        return False
    return True


def devices_there(cluster: Cluster, replicas: int) -> int:
    """How many devices a cluster that is not endless has for each of its replicas.

    Raises:
        UsageError: when it has none.
    """
    there = len(cluster.devices) // replicas
    if there < 1:
        raise UsageError(
            f"{replicas} replicas of the pipeline need more than {len(cluster.devices)} devices"
        )
    return there


def microbatch_size(batch_size: int, microbatches: int, replicas: int = 1) -> int:
    """Samples in a micro-batch.

    Args:
        replicas: that share the batch.

    Raises:
        UsageError: for no micro-batches.
        PlanError: when the batch does not split evenly.
    """
    if microbatches < 1:
        raise UsageError(f"{microbatches} micro-batches: at least one is needed")
    if batch_size % replicas:
        raise PlanError(
            f"a batch of {batch_size} samples does not split over {replicas} replicas",
            hint="use an example batch of another size; the package itself runs any",
        )
    batch_size //= replicas
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
            hint=f"use {' or '.join(map(str, near))} micro-batches, or an example batch of another "
            "size; the package itself runs batches of any size",
        )
    return batch_size // microbatches
