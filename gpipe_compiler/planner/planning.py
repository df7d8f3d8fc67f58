"""The pipeline that a choice asks for: devices and links, the size of micro-batches, and the time
in which replicas that divide the weights gather them."""

from __future__ import annotations

from dataclasses import replace

from gpipe_compiler.cluster import Cluster, Link
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.passes.footprint import update_s_per_byte
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.cut_problem import CutFacts
from gpipe_compiler.runtime.core.shards import blocks_of
from gpipe_compiler.runtime.schedule.choosing import devices_for, placement_for
from gpipe_compiler.runtime.spec import ScheduleKind


def setting_for(cluster: Cluster, choice: Choice, policy: Policy, *, training: bool) -> CutSetting:
    """What a cut of a choice is for, in which nothing is recomputed.

    Raises:
        UsageError: when there are too few devices for the replicas.
        PlanError: when the schedule cannot have that many stages.
    """
    kind = choice.schedule if training else None
    devices = choice.devices
    replicas = policy.data_parallel
    cluster = cluster.sized(devices)
    there = len(cluster.devices) if cluster.endless else devices_there(cluster, replicas)
    kinds = cluster.kinds
    numbers = range(there)
    slots = []
    for number in numbers:
        device = cluster.devices[number]
        # The devices of the same rank in all replicas reduce gradients with one another.
        peer = cluster.link
        if not cluster.endless and replicas > 1:
            peer = cluster.between(number, number + there)
        rate = update_s_per_byte(device, policy.counted_optimizer, replicas, peer, policy.division)
        slots.append(
            DeviceSlot(
                kinds.index(device),
                device.room,
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
        tuple(slots),
        links,
        min(devices, there),
        objective=policy.objective,
    )


def pipeline_devices(cluster: Cluster, stages: int, policy: Policy, *, training: bool) -> int:
    """How many devices a pipeline of these stages has: as its schedule needs, if there are.

    Raises:
        UsageError: for no stages, or when there are too few devices for the replicas.
        PlanError: when the schedule cannot have that many stages.
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
            "size; the package itself runs batches of any size. Where the batch is another "
            "dimension of an input, say so: --batch-dim NAME=1",
        )
    return batch_size // microbatches


# --- weights gathered block by block --------------------------------------------------------------


def peer_link(cluster: Cluster, choice: Choice, policy: Policy) -> Link:
    """The slowest link between a device and the one of the same rank in the next replica."""
    cluster = cluster.sized(choice.devices)
    if cluster.endless:
        return cluster.link
    there = devices_there(cluster, policy.data_parallel)
    links = [cluster.between(number, number + there) for number in range(there)]
    return max(links, key=lambda link: link.seconds(1 << 20))


def with_gathering(problem: CutProblem, facts: CutFacts, link: Link, policy: Policy) -> CutProblem:
    """The problem in which ops wait for their weights, and backwards for gradients too.

    A block is gathered in every forward and backward, and its gradients are reduced: each time
    every replica sends and receives all but its own part, around a ring. Nothing is computed in the
    meantime.
    """
    share = (policy.data_parallel - 1) / policy.data_parallel
    sizes = {state.name: state.bytes for state in facts.graph.state.values() if state.requires_grad}
    blocks = blocks_of(list(sizes))
    seen: set[str] = set()
    seconds = []
    for op in facts.kept:
        own = [name for name in facts.states[op.name] if name in sizes and name not in seen]
        begun = {blocks[name] for name in own} - seen
        seen.update(own, begun)
        waits = sum(sizes[name] for name in own) * share / link.bandwidth
        seconds.append(waits + len(begun) * link.latency_s)
    return replace(
        problem,
        nodes=tuple(
            replace(node, forward_s=node.forward_s + s, backward_s=node.backward_s + 2 * s)
            for node, s in zip(problem.nodes, seconds, strict=True)
        ),
        other_kinds=tuple(
            tuple(
                replace(one, forward_s=one.forward_s + s, backward_s=one.backward_s + 2 * s)
                for one, s in zip(kind, seconds, strict=True)
            )
            for kind in problem.other_kinds
        ),
    )
