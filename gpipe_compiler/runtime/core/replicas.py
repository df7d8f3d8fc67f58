"""Replicas of a pipeline under torchrun: which rank is which, and collectives among them.

R replicas of a pipeline over K devices take R times K processes: rank `replica * K + device`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..wording import counted
from .distributed import Network
from .gpus import gpu_count
from .meeting import meet


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

    def join(self, groups: Sequence[Sequence[int]], own: int, timeout_s: float) -> None:
        """Make the groups of these ranks; of the first with the rank `own`, this one is a member.

        All ranks call it with the same groups.
        """
        for ranks in groups:
            made = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if own in ranks:
                self._groups.append(made)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start to sum a tensor, in place, over the ranks of the group."""
        return dist.all_reduce(tensor, group=self._groups[0], async_op=True)

    def close(self) -> None:
        """Leave the process groups, after all that was begun has ended."""
        self._finalizer()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()


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
        """Join the process group, making it unless the caller has (`meet`).

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
            meet(device, timeout_s)
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


def device_of_rank(named: torch.device | None, order: Sequence[int] = ()) -> torch.device:
    """Where this rank computes: as named, "cuda" being the GPU of its local rank.

    Args:
        order: as planned, for each device of the pipeline, its number among those of the machine,
            or host by host of all machines.
    """
    count = gpu_count()
    device = torch.device("cuda", gpu_of_rank(order, count)) if count else torch.device("cpu")
    return device if named in (None, torch.device(device.type)) else named


def gpu_of_rank(order: Sequence[int], count: int) -> int:
    """The number of this rank's GPU, of `count` on its host.

    As planned, the replicas one after another. Where that does not give each rank of this host a
    GPU of its own here, in order.
    """
    rank, local, beside = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    if order:
        host = (rank - local) // beside
        places = (divmod(rank - local + own, len(order)) for own in range(beside))
        planned = [order[place] + replica * len(order) - host * count for replica, place in places]
        if len(set(planned)) == beside and all(0 <= number < count for number in planned):
            return planned[local]
    return local % count


def _leave(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        group = groups.pop()
        if dist.is_initialized():
            dist.destroy_process_group(group)
