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
from ..wording import counted
from .devices import default_devices, device_of_rank, listed_devices, own_device, there
from .distributed import Network, OverRanks, alone
from .options import TransportKind, transport_kind
from .rendezvous import Collectives, join_process_group


def planned_placement(spec: PipelineSpec) -> tuple[int, ...]:
    """The device of each stage, as planned."""
    return spec.placement or tuple(range(len(spec.stages)))


def spread(spec: PipelineSpec, schedule: ScheduleKind, devices: int) -> tuple[int, ...]:
    """The device of each stage: as planned, or else where the schedule puts it.

    Raises:
        UsageError: when the schedule cannot have the stages on so many devices.
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
        UsageError: when the schedule cannot have so many stages.
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
    """The numbers of devices that a schedule can have so many stages on, as "1, 2 or 4"."""
    possible = []
    for devices in range(1, stages + 1):
        with contextlib.suppress(ValueError):
            placement_for(schedule, stages, devices)
            possible.append(str(devices))
    return " or ".join(filter(None, [", ".join(possible[:-1]), *possible[-1:]]))


@dataclass(frozen=True)
class Replicas:
    """This process among the replicas of a pipeline.

    Attributes:
        world: all ranks.
        pipeline: those of this replica, in the order of its devices.
        peers: those that hold the same device in every replica, in the order of replicas.
        collectives: among the peers.
    """

    world: Network
    pipeline: Network
    peers: Network
    collectives: Collectives

    @classmethod
    def join(
        cls,
        device: torch.device | None,
        timeout_s: float,
        count: int,
        order: Sequence[int] = (),
    ) -> Replicas:
        """Join the process group, making it unless the caller has (`join_process_group`).

        Args:
            device: where this rank computes; None for the GPU of its local rank, if there are any.
            count: how many replicas there are.
            order: of a replica's devices (`gpu_of_rank`).

        Raises:
            UsageError: when the processes are no multiple of it.
            TransportError: when they do not find each other.
        """
        owns = not dist.is_initialized()
        size = int(os.environ.get("WORLD_SIZE", "1")) if owns else dist.get_world_size()
        if count < 1 or size % count:
            raise UsageError(
                f"{counted(size, 'process', 'es')} cannot be {count} replicas of a pipeline",
                hint="torchrun starts replicas times devices: --nproc-per-node times --nnodes",
            )
        device = device_of_rank(device, order if len(order) * count == size else ())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if owns:
            join_process_group(device, timeout_s)
        return cls.among(Network.of_all(device, timeout_s), count, owns_world=owns)

    @classmethod
    def among(cls, world: Network, count: int, *, owns_world: bool) -> Replicas:
        """So many replicas, of equally many ranks of the world."""
        devices = world.size // count
        replica, own = divmod(world.rank, devices)
        peers = [range(device, world.size, devices) for device in range(devices)]
        collectives = Collectives(owns_world=owns_world)
        if count > 1:
            collectives.join(peers, world.rank, world.timeout_s)
        pipeline = world.among(range(replica * devices, (replica + 1) * devices))
        return cls(world, pipeline, world.among(peers[own]), collectives)

    @property
    def number(self) -> int:
        """The number of this replica."""
        return self.peers.rank

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return self.peers.size

    def close(self) -> None:
        """Leave the process groups."""
        self.collectives.close()
        self.world.peers.close()


@dataclass(frozen=True)
class Topology:
    """This process among those of a pipeline.

    Attributes:
        placement: the device of each stage, by its number in the pipeline.
        devices: in one process, where each device computes.
        members: the processes; None for one alone.
    """

    placement: tuple[int, ...]
    devices: tuple[torch.device, ...]
    members: Replicas | None

    @classmethod
    def gather(
        cls,
        spec: PipelineSpec,
        schedule: ScheduleKind,
        devices: Sequence[torch.device | str] | torch.device | str | None,
        transport: TransportKind | str | None,
        data_parallel: int,
        timeout_s: float,
    ) -> Topology:
        """Find the devices, and join the other processes.

        Raises:
            UsageError: when stages, devices, processes and replicas do not go into one another.
        """
        given = listed_devices(devices)
        if transport_kind(transport) is TransportKind.DISTRIBUTED:
            own, order = own_device(given), spec.device_order
            members = Replicas.join(own, timeout_s, data_parallel, order)
            return cls(spread(spec, schedule, members.pipeline.size), given, members)
        if data_parallel != 1:
            raise UsageError(
                f"{data_parallel} replicas need a process for every device of each",
                hint="start them with torchrun --nproc-per-node",
            )
        given = tuple(map(there, given))
        given = given or default_devices(devices_by_default(spec, schedule), spec.device_order)
        return cls(spread(spec, schedule, len(given)), given, None)

    @property
    def pipeline(self) -> Network | None:
        """The processes of this replica of the pipeline; None in one process."""
        return None if self.members is None else self.members.pipeline

    @property
    def world(self) -> Network | None:
        """All processes, those of other replicas too; None in one process."""
        return None if self.members is None else self.members.world

    @property
    def rank(self) -> int:
        """This process's number; 0 for the only one."""
        return 0 if self.members is None else self.members.world.rank

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are."""
        return 1 if self.members is None else self.members.count

    @property
    def replica(self) -> int:
        """The number of the replica that this process belongs to."""
        return 0 if self.members is None else self.members.number

    @property
    def feeds(self) -> bool:
        """Whether this process passes inputs: the first of each replica does."""
        return self.pipeline is None or self.pipeline.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes; the first of its devices."""
        return self.devices[0] if self.pipeline is None else self.pipeline.device

    @property
    def where(self) -> Mapping[int, torch.device]:
        """The stages of this process, and where they compute."""
        if self.pipeline is None:
            return {stage: self.devices[d] for stage, d in enumerate(self.placement)}
        mine = [stage for stage, d in enumerate(self.placement) if d == self.pipeline.rank]
        return dict.fromkeys(mine, self.pipeline.device)

    @property
    def over_ranks(self) -> OverRanks:
        """The sum over all processes, those of other replicas too."""
        return alone if self.world is None else self.world.sum

    def share(self, numbers: Sequence[float], what: str) -> tuple[float, ...]:
        """Rank 0's numbers on every rank, of the types that they have there.

        Args:
            what: they are, for the message of a rank that waits for them in vain.
        """
        if self.world is None:
            return tuple(numbers)
        return self.world.broadcast_object(tuple(numbers), 0, what)

    def __str__(self) -> str:
        if self.pipeline is None:
            devices = ", ".join(dict.fromkeys(map(str, self.devices)))
            count = len(self.devices)
            where = f"{counted(count, 'thread')} on {devices}"
        else:
            count = self.pipeline.size
            where = f"{counted(count, 'process', 'es')} on {self.pipeline.device.type}"
        return f"{self.replicas} replicas of {where}" if self.replicas > 1 else where
