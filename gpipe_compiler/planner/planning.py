"""The pipeline that a choice asks for: its devices and links, and the size of its micro-batches."""

from __future__ import annotations

from gpipe_compiler.cluster import Cluster
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.passes.footprint import update_s_per_byte
from gpipe_compiler.plan.pareto import Choice
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
