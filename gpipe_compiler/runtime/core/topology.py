"""Which device computes which stage, and which processes: pipelines and their replicas."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..schedule import devices_for, placement_for
from ..spec import PipelineSpec, ScheduleKind
from ..wording import counted, listed
from .devices import default_devices, device_of_rank, listed_devices, own_device, there
from .distributed import Network
from .options import TransportKind, transport_kind
from .rendezvous import Collectives, join_process_group


def planned_placement(spec: PipelineSpec) -> tuple[int, ...]:
    """The device of each stage, as planned."""
    return spec.placement or tuple(range(len(spec.stages)))


def spread(spec: PipelineSpec, schedule: ScheduleKind, devices: int) -> tuple[int, ...]:
    """The device of each stage: as planned, or else where the schedule puts it.

    Raises:
        UsageError: when the schedule cannot place the stages on that many devices.
    """
    planned = planned_placement(spec)
    if (schedule, devices) == (spec.schedule, max(planned) + 1):
        return planned
    stages = len(spec.stages)
    try:
        return placement_for(schedule, stages, devices)
    except ValueError as error:
        possible = device_counts(stages, schedule)
        raise UsageError(
            f"{counted(stages, 'stage')} cannot be spread over {devices} devices or processes "
            f"by the schedule {schedule.value}",
            hint=f"use {possible}, or another --schedule" if possible else "use another --schedule",
        ) from error


def devices_by_default(spec: PipelineSpec, schedule: ScheduleKind) -> int:
    """How many devices the stages are spread over, unless somebody says otherwise.

    Raises:
        UsageError: when the schedule cannot have that many stages.
    """
    if schedule is spec.schedule:
        return max(planned_placement(spec)) + 1
    try:
        return devices_for(schedule, len(spec.stages))
    except ValueError as error:
        raise UsageError(str(error), hint="use another --schedule") from error


def replicas_by_default(spec: PipelineSpec, processes: int) -> int:
    """How many replicas train, unless somebody says otherwise.

    As planned where just the processes are there that these need; one otherwise.
    """
    planned = spec.replicas * (max(planned_placement(spec)) + 1)
    return spec.replicas if processes == planned else 1


def device_counts(stages: int, schedule: ScheduleKind) -> str:
    """The numbers of devices that a schedule can place the stages on, as "1, 2 or 4"."""
    possible = []
    for devices in range(1, stages + 1):
        with contextlib.suppress(ValueError):
            placement_for(schedule, stages, devices)
            possible.append(str(devices))
    return listed(possible, "or")


@dataclass(frozen=True)
class Topology:
    """This process among those of a pipeline and its replicas; one alone is a network of one.

    Attributes:
        placement: the device of each stage, by its number in the pipeline.
        devices: where this process computes: all devices of the pipeline, or its own one.
        world: all ranks.
        pipeline: those of this replica, in the order of its devices.
        peers: those that hold the same device in every replica, in the order of replicas.
        collectives: among the peers.
    """

    placement: tuple[int, ...]
    devices: tuple[torch.device, ...]
    world: Network
    pipeline: Network
    peers: Network
    collectives: Collectives

    @classmethod
    def gather(
        cls,
        spec: PipelineSpec,
        schedule: ScheduleKind,
        devices: Sequence[torch.device | str] | torch.device | str | None,
        transport: TransportKind | str | None,
        replicas: int,
        timeout_s: float,
    ) -> Topology:
        """Find the devices, and join the other processes.

        Raises:
            UsageError: when stages, devices, processes and replicas do not go into one another.
            TransportError: when the processes do not find each other.
        """
        given = listed_devices(devices)
        if transport_kind(transport) is TransportKind.DISTRIBUTED:
            world, owns_world = _joined(own_device(given), spec.device_order, replicas, timeout_s)
            placement = spread(spec, schedule, world.size // replicas)
            return cls.among(placement, world, replicas, owns_world=owns_world)
        if replicas != 1:
            raise UsageError(
                f"{replicas} replicas need a process for every device of each",
                hint="start them with torchrun --nproc-per-node",
            )
        given = tuple(map(there, given))
        given = given or default_devices(devices_by_default(spec, schedule), spec.device_order)
        placement, one = spread(spec, schedule, len(given)), Network.alone(given[0])
        return cls(placement, given, one, one, one, Collectives(owns_world=False))

    @classmethod
    def among(
        cls, placement: tuple[int, ...], world: Network, replicas: int, *, owns_world: bool
    ) -> Topology:
        """So many replicas, of equally many ranks of the world."""
        devices = world.size // replicas
        replica, own = divmod(world.rank, devices)
        peers = [range(device, world.size, devices) for device in range(devices)]
        collectives = Collectives(owns_world=owns_world)
        if replicas > 1:
            collectives.join(peers, world.rank, world.timeout_s)
        pipeline = world.among(range(replica * devices, (replica + 1) * devices))
        mine = (world.device,)
        return cls(placement, mine, world, pipeline, world.among(peers[own]), collectives)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the pipeline of this process's devices."""
        if self.pipeline.size == 1:
            return tuple(range(len(self.devices)))
        return (self.pipeline.rank,)

    def rank_of(self, stage: int) -> int:
        """The rank in the pipeline that holds a stage."""
        return 0 if self.pipeline.size == 1 else self.placement[stage]

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are."""
        return self.peers.size

    @property
    def replica(self) -> int:
        """The number of the replica that this process belongs to."""
        return self.peers.rank

    @property
    def feeds(self) -> bool:
        """Whether this process passes inputs: the first of each replica does."""
        return self.pipeline.rank == 0

    @property
    def where(self) -> Mapping[int, torch.device]:
        """The stages of this process, and where they compute."""
        own = dict(zip(self.numbers, self.devices, strict=True))
        return {stage: own[d] for stage, d in enumerate(self.placement) if d in own}

    def close(self) -> None:
        """Leave the process groups."""
        self.collectives.close()
        self.world.peers.close()

    def __str__(self) -> str:
        if self.world.size == 1:
            devices = ", ".join(dict.fromkeys(map(str, self.devices)))
            return f"{counted(len(self.devices), 'thread')} on {devices}"
        where = f"{counted(self.pipeline.size, 'process', 'es')} on {self.world.device.type}"
        return f"{self.replicas} replicas of {where}" if self.replicas > 1 else where


def _joined(
    device: torch.device | None, order: Sequence[int], replicas: int, timeout_s: float
) -> tuple[Network, bool]:
    """All ranks, and whether their process group was made here (`join_process_group`).

    Args:
        device: where this rank computes; None for the GPU of its local rank, if there are any.
        order: of a replica's devices (`gpu_of_rank`).
    """
    owns = not dist.is_initialized()
    size = int(os.environ.get("WORLD_SIZE", "1")) if owns else dist.get_world_size()
    if replicas < 1 or size % replicas:
        raise UsageError(
            f"{counted(size, 'process', 'es')} cannot be {replicas} replicas of a pipeline",
            hint="torchrun starts replicas times devices: --nproc-per-node times --nnodes",
        )
    device = device_of_rank(device, order if len(order) * replicas == size else ())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if owns:
        join_process_group(device, timeout_s)
    return Network.of_all(device, timeout_s), owns
