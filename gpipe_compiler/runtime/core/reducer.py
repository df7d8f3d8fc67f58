"""Averages gradients over the replicas of a pipeline, while other stages still compute theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..spec import PipelineSpec, covers
from .distributed import Network
from .local_stages import LocalStages, SharedParameter
from .shards import local
from .topology import Topology

BUCKET_BYTES = 25 << 20
"""About what is reduced at a time, as in torch's DistributedDataParallel."""


Started = tuple[Any, Callable[[], None]]
"""A bucket on its way: what to wait for, and what then takes its gradients."""


@dataclass(eq=False)
class Reducer:
    """Averages the gradients of one device over the replicas.

    Gradients of a stage are reduced from the end of its last backward of a step on; those of
    parameters that several stages own, after the step. Each is then the mean over replicas, the
    same bits in all. A gradient that is missing in some replicas counts as zeros there; one that is
    missing in all stays away. Sparse ones become dense.

    What is reduced is all that has been accumulated. So a mean that is reduced a second time, with
    another step added to it, remains right.

    Attributes:
        stages: the parameters of each stage of this device that no other stage owns.
        shared: those with other owners.
        owners: the devices that own each of those, in order.
        limit: bytes after which a row of gradients is reduced.
        paused: whether gradients are left as they are for now.
        left: whether some may have been since all were reduced.
    """

    topology: Topology
    stages: Mapping[int, Sequence[nn.Parameter]]
    shared: Sequence[SharedParameter]
    owners: Mapping[str, Sequence[int]]
    limit: int = BUCKET_BYTES
    paused: bool = field(default=False, init=False)
    left: bool = field(default=False, init=False)
    _waiting: list[int] = field(default_factory=list, init=False)
    _ended: set[int] = field(default_factory=set, init=False)
    _started: list[Started] = field(default_factory=list, init=False)

    @contextlib.contextmanager
    def pause(self, paused: bool = True) -> Iterator[None]:
        """Around steps whose gradients are left as they are for now, or are not."""
        before, self.paused = self.paused, paused
        self.left = self.left or paused
        try:
            yield
        finally:
            self.paused = before

    def begin(self) -> None:
        """Before a step."""
        self._waiting = [] if self.paused else sorted(self.stages)
        self._ended = set()
        self._started = []

    def stage_ended(self, stage: int) -> None:
        """After the last backward of a stage. Starts in the order of stages, last first."""
        self._ended.add(stage)
        while self._waiting and self._waiting[-1] in self._ended:
            self._start(self.stages[self._waiting.pop()])

    def finish(self) -> None:
        """After a step that went well: every gradient here is the mean over replicas.

        Raises:
            TransportError: when another replica is gone.
        """
        if self.paused:
            return
        self.left = False
        while self._waiting:
            self._start(self.stages[self._waiting.pop()])
        own = self.topology.pipeline.rank
        self._start([item.canonical for item in self.shared if self.owners[item.name][0] == own])
        self._wait()
        for item in self.shared:
            self._pass_on(item)

    def _wait(self) -> None:
        """For all that has been started."""
        started, self._started = self._started, []
        for one in started:
            self._end(one)

    def _end(self, started: Started) -> None:
        work, take = started
        self.topology.world.wait(work, lambda: "at the gradients of the other replicas")
        take()

    def abandon(self) -> None:
        """After a step that failed."""
        self._waiting, self._started = [], []

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        trained = [p for p in reversed(parameters) if p.requires_grad]
        for bucket in buckets(trained, self.limit):
            row = self._pack(bucket)
            work = self.topology.collectives.all_reduce(row)
            self._started.append((work, partial(self._unpack, bucket, row)))

    def _pack(self, bucket: Sequence[nn.Parameter]) -> torch.Tensor:
        """Its gradients in a row, then a flag for each, to be summed in place."""
        pieces = []
        for parameter in bucket:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            pieces.append(_real(gradient.to_dense().contiguous()).reshape(-1))
        flags = [float(parameter.grad is not None) for parameter in bucket]
        pieces.append(torch.tensor(flags, dtype=pieces[0].dtype, device=pieces[0].device))
        # Divided before the sum: what fits a gradient's type then still does.
        return torch.cat(pieces).div_(self.topology.replicas).to(self.topology.world.carrier)

    def _unpack(self, bucket: Sequence[nn.Parameter], row: torch.Tensor) -> None:
        row = row.to(bucket[0].device)
        missing = [parameter.grad is None for parameter in bucket]
        count = len(bucket)
        # The flags are only looked at where they matter: that waits for a GPU.
        flags = row[-count:].tolist() if any(missing) else [1.0] * count
        offset = 0
        for parameter, flag in zip(bucket, flags, strict=True):
            length = _real(parameter.detach()).numel()
            mean = row[offset : offset + length]
            offset += length
            if parameter.grad is None or parameter.grad.is_sparse:
                if flag:
                    parameter.grad = torch.empty_like(parameter)
                else:
                    continue
            _real(parameter.grad).copy_(mean.view(_real(parameter.grad).shape))

    def _pass_on(self, item: SharedParameter) -> None:
        """Give other owners the first one's mean: reduced by each, the last bits could differ."""
        self._share_first(item, item.canonical)

    def _share_first(self, item: SharedParameter, parameter: nn.Parameter) -> None:
        """Let a gradient of a parameter that several devices own be the first one's.

        Args:
            parameter: the one that carries it, or the rows of it that lie here.
        """
        first, *others = self.owners[item.name]
        if not others:
            return
        pipeline = self.topology.pipeline
        what = f"the gradient of {item.name}"
        found = torch.tensor([float(parameter.grad is not None)])
        if not pipeline.broadcast(found, first, f"{what} (whether there is one)", others):
            return
        if parameter.grad is None:
            # In this replica nobody had one.
            parameter.grad = torch.zeros_like(parameter)
        gradient = local(parameter.grad)
        gradient.copy_(pipeline.broadcast(gradient, first, what, others))


def written(spec: PipelineSpec, modules: Mapping[int, nn.Module]) -> list[torch.Tensor]:
    """The buffers that forwards of these stages write to, in their present mode."""
    return [
        buffer
        for index, module in modules.items()
        if module.training
        for name, buffer in module.named_buffers()
        if covers(spec.stages[index].writes, name)
    ]


def share_buffers(peers: Network, tensors: Sequence[torch.Tensor]) -> None:
    """Let tensors be those of the first replica; all replicas call it with tensors alike."""
    if peers.size == 1:
        return
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor.detach())
    for dtype, alike in kinds.items():
        row = torch.cat([tensor.reshape(-1) for tensor in alike])
        row = peers.broadcast(row, 0, f"the buffers of {dtype} of the first replica")
        if peers.rank == 0:
            continue
        parts = torch.split(row, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def share_initial(
    topology: Topology,
    stages: LocalStages,
    owners: Mapping[str, Sequence[int]],
    made: Collection[str] | None,
) -> None:
    """Weights that were made in the processes are those of the first replica, and first owner.

    Args:
        made: the names of these; None for all.
        owners: the stages that own each trained parameter that several do.
    """
    for item in stages.shared:
        if made is not None and item.name not in made:
            continue
        first, *others = sorted({topology.rank_of(stage) for stage in owners[item.name]})
        mine = item.canonical.detach()
        value = topology.pipeline.broadcast(mine, first, f"the initial {item.name}", others)
        mine.copy_(value)
    for name, tensor in stages.state_dict().items():
        if made is None or name in made:
            share_buffers(topology.peers, [tensor])


@contextlib.contextmanager
def collected(shared: Sequence[SharedParameter], reducer: Reducer | None) -> Iterator[None]:
    """Around a step: afterwards, gradients are sums over the owners, and means over replicas."""
    for item in shared:
        item.begin()
    if reducer is not None:
        reducer.begin()
    try:
        yield
    except BaseException:  # Ctrl-C too: the next step begins anew
        if reducer is not None:
            reducer.abandon()
        raise
    finally:
        for item in shared:
            item.finish()
    if reducer is not None:
        reducer.finish()


def buckets(parameters: Sequence[nn.Parameter], limit: int) -> list[tuple[nn.Parameter, ...]]:
    """Parameters in order, in rows of one dtype and one device of about `limit` bytes."""
    rows: list[list[nn.Parameter]] = []
    open_rows: dict[tuple[torch.dtype, torch.device], tuple[int, list[nn.Parameter]]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        size, row = open_rows.get(kind, (limit, []))
        if size >= limit:
            size, row = 0, []
            rows.append(row)
        row.append(parameter)
        open_rows[kind] = size + parameter.nbytes, row
    return [tuple(row) for row in rows]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
