"""Which device computes which stage, and which processes: pipelines and their replicas."""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from ..errors import TransportError, UsageError
from ..schedule import devices_for, placement_for
from ..spec import PipelineSpec, ScheduleKind
from ..wording import counted, first_line, listed
from .devices import (
    default_devices,
    device_of_rank,
    identity,
    listed_devices,
    own_device,
    there,
)
from .distributed import Network
from .options import TransportKind, transport_kind
from .typed import from_environment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        pipeline: those of this replica, in the order of its devices.
        peers: those that hold the same device in every replica, in the order of replicas.
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
        devices = world.size // replicas
        replica, own = divmod(world.rank, devices)
        peers = [range(device, world.size, devices) for device in range(devices)]
        collectives = Collectives(owns_world=owns_world)
        if replicas > 1:
            collectives.join(peers, world.timeout_s)
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
        return 0 if self.pipeline.size == 1 else self.placement[stage]

    @property
    def replicas(self) -> int:
        return self.peers.size

    @property
    def replica(self) -> int:
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
    size = from_environment("WORLD_SIZE", 1) if owns else dist.get_world_size()
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


# --- how the processes of one start find each other -----------------------------------------------
#
# torchrun keeps its store when it starts processes again (torch 2.13), and gloo then reads in it
# the addresses of processes that have died. So the processes of a start first agree on a name that
# no other start has had, and meet under it.

_PAUSE_S = 0.01


def join_process_group(device: torch.device, timeout_s: float) -> None:
    """Make the process group of all ranks: NCCL where each has a GPU of its own, gloo elsewhere.

    Raises:
        UsageError: when the environment does not say where.
        TransportError: when they do not find each other in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        own = distributed_c10d.PrefixStore(_agreed_name(store, rank, size, timeout_s), store)
        backend = _agreed_backend(own, rank, size, identity(device))
        dist.init_process_group(
            backend,
            store=own,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    except ValueError as error:  # of what torch reads in the environment
        raise UsageError(
            f"where the processes meet is not said: {first_line(error)}",
            hint="start them with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        ) from error
    except RuntimeError as error:  # the root of torch's own, which are of many kinds
        raise TransportError(
            f"the processes do not find each other: {first_line(error)}",
            hint="on several hosts, see whether GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the "
            "network that joins them; --timeout is how long they wait",
        ) from error


def _agreed_backend(store: distributed_c10d.Store, rank: int, size: int, gpu: str) -> str:
    """The backend of all ranks, which NCCL is no way for where two of them share a GPU."""
    store.set(f"pipeline/gpu/{rank}", gpu)
    if rank == 0:
        gpus = {store.get(f"pipeline/gpu/{other}").decode() for other in range(size)}
        apart = len(gpus) == size and "" not in gpus
        store.set("pipeline/backend", "nccl" if apart and dist.is_nccl_available() else "gloo")
    backend: str = store.get("pipeline/backend").decode()
    return backend


def _agreed_name(store: distributed_c10d.Store, rank: int, size: int, timeout_s: float) -> str:
    """A name for this start, the same on every rank.

    What ranks of an earlier start have left is not to be told from what those of this one write.
    So every other rank calls itself by a new name, and believes only what is said to that. Rank 0
    answers whatever name it finds, until every rank has heard it.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"pipeline/called/{rank}", own)
        name: str = store.get(f"pipeline/told/{own}").decode()
        store.set(f"pipeline/heard/{name}/{rank}", "")
        return name
    answered: set[str] = set()
    waiting = set(range(1, size))
    end = time.monotonic() + timeout_s
    while waiting:
        for other in sorted(waiting):
            if store.check([f"pipeline/heard/{own}/{other}"]):
                waiting.discard(other)
            elif store.check([f"pipeline/called/{other}"]):
                called = store.get(f"pipeline/called/{other}").decode()
                if called not in answered:
                    store.set(f"pipeline/told/{called}", own)
                    answered.add(called)
        if waiting and time.monotonic() > end:
            missing = ", ".join(map(str, sorted(waiting)))
            raise RuntimeError(f"rank 0 hears nothing of rank {missing}")
        time.sleep(_PAUSE_S if waiting else 0)
    return own


class Collectives:
    """The process groups of this process, and collectives among some of its ranks.

    Where the threads of gloo let go of the last tensor of a collective after the interpreter has
    begun to end, they abort the process ("terminate called without an active exception"). They end
    with the last reference to their group. So nobody else keeps one, and `close`, or at the latest
    the beginning of the interpreter's end, drops it.

    Args:
        owns_world: whether the process group of all ranks is to be taken down too.
    """

    def __init__(self, *, owns_world: bool) -> None:
        self._owns_world = owns_world
        self._groups: list[dist.ProcessGroup] = []
        self._finalizer = weakref.finalize(self, _leave, self._groups)

    def join(self, groups: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Make the groups of these ranks, and keep the one that this rank is a member of.

        All ranks call it with the same groups.
        """
        for ranks in groups:
            made = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if isinstance(made, dist.ProcessGroup):  # else a mark that says: not a member
                self._groups.append(made)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start to sum a tensor, in place, over the ranks of the group."""
        return dist.all_reduce(tensor, group=self._groups[0], async_op=True)

    def reduce_scatter(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start to sum a tensor over the ranks of the group; each gets the row of its number.

        Args:
            tensor: a row for each rank.
        """
        own = torch.empty_like(tensor[0])
        # Called otherwise up to torch 2.12.
        single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return own, single(own, tensor.view(-1), group=self._groups[0], async_op=True)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks of the group, as torch's sharded tensors know them."""
        from torch.distributed.device_mesh import DeviceMesh

        # Torch takes meshes of equal names for one, also where the group of one has been left.
        group = self._groups[0]
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(group.group_name,))

    def close(self) -> None:
        self._finalizer()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()


def _leave(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        group = groups.pop()
        if dist.is_initialized():
            dist.destroy_process_group(group)
