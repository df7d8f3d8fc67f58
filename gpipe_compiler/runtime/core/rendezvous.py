"""How the processes of one start find each other, and not those of an earlier one.

torchrun keeps its store when it starts processes again (torch 2.13), and gloo then reads in it the
addresses of processes that have died. So the processes of a start first agree on a name that no
other start has had, and meet under it.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from ..errors import TransportError
from ..wording import first_line
from .devices import identity

_PAUSE_S = 0.01


def join_process_group(device: torch.device, timeout_s: float) -> None:
    """Make the process group of all ranks: NCCL where each has a GPU of its own, gloo elsewhere.

    Raises:
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
    except RuntimeError as error:  # the root of torch's own, which are of many kinds
        raise TransportError(
            f"the processes do not find each other: {first_line(error)}",
            hint="on several hosts, see whether GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the "
            "network that joins them; --timeout is how long they wait",
        ) from error


def _agreed_backend(store: distributed_c10d.Store, rank: int, size: int, gpu: str) -> str:
    """The backend of all ranks, which NCCL is no way for where two of them share a GPU.

    Args:
        gpu: this rank's (`identity`).
    """
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


def _leave(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        group = groups.pop()
        if dist.is_initialized():
            dist.destroy_process_group(group)
