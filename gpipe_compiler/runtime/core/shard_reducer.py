"""Averages gradients over replicas that share the weights: each gets its own rows of the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from .blocks import StageBlocks
from .local_stages import LocalStages, SharedParameter
from .reducer import Reducer, Started, buckets
from .shards import Group, Shard, Shards, as_gradient, rows_each
from .topology import Topology


@dataclass(eq=False)
class ShardReducer(Reducer):
    """Gradients of divided parameters go to the replicas that own their rows, and are freed here.

    What stays whole is reduced as in a `Reducer`. A gradient that is reduced joins what was reduced
    before.
    """

    shards: Shards = field(kw_only=True)
    _of_block: Started | None = field(default=None, init=False)

    def begin(self) -> None:
        self.shards.begin()
        self._of_block = None
        super().begin()

    def finish(self) -> None:
        self._wait_for_block()
        if self.paused:
            self.shards.keep()
        super().finish()

    def abandon(self) -> None:
        self._of_block = None
        super().abandon()

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        divided = [p for p in reversed(parameters) if self.shards.of(p) is not None]
        super()._start([p for p in parameters if self.shards.of(p) is None])
        for bucket in buckets(self._left(divided), self.limit):
            shards = tuple(shard for p in bucket if (shard := self.shards.of(p)) is not None)
            self._started.append(self._scatter(shards))

    def _left(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those of which something is to be reduced: of blocks, where it came too late before."""
        of_blocks = [p for p in parameters if self.shards.in_block(p)]
        if not of_blocks:
            return list(parameters)
        mine = torch.tensor([float(p.grad is not None) for p in of_blocks])
        anywhere = self.topology.peers.sum(mine, "which gradients are left").tolist()
        done = {id(p) for p, left in zip(of_blocks, anywhere, strict=True) if not left}
        return [p for p in parameters if id(p) not in done]

    def reduce_block(self, shards: Sequence[Shard]) -> None:
        """Start to reduce the gradients of a block, after those of the one before it."""
        self._wait_for_block()
        self._of_block = self._scatter(shards)

    def _wait_for_block(self) -> None:
        started, self._of_block = self._of_block, None
        if started is not None:
            self._end(started)

    def _scatter(self, shards: Sequence[Shard]) -> Started:
        row, work = self.topology.collectives.reduce_scatter(self._rows(shards))
        return work, partial(self._take, shards, row)

    def _rows(self, shards: Sequence[Shard]) -> torch.Tensor:
        """For each replica a row: its rows of every gradient, filled up to as many, and flags."""
        replicas = self.topology.replicas
        like = shards[0].whole
        widths = [_width(shard, replicas) for shard in shards]
        rows = torch.zeros(
            (replicas, sum(widths) + len(shards)), dtype=like.dtype, device=like.device
        )
        offset = 0
        for number, (shard, width) in enumerate(zip(shards, widths, strict=True)):
            gradient, shard.whole.grad = shard.whole.grad, None
            if gradient is not None:
                flat = gradient.to_dense().reshape(-1)
                for replica in range(-(-len(flat) // max(1, width))):
                    piece = flat[replica * width : (replica + 1) * width]
                    rows[replica, offset : offset + len(piece)] = piece
                rows[:, number - len(shards)] = 1
            offset += width
        # Divided before the sum: what fits a gradient's type then still does.
        return rows.div_(replicas)

    def _take(self, shards: Sequence[Shard], row: torch.Tensor) -> None:
        """Add this replica's rows of the mean to what was reduced before."""
        flags = row[-len(shards) :].tolist()
        offset = 0
        for shard, flag in zip(shards, flags, strict=True):
            if flag:
                _add(shard, row[offset : offset + shard.part.numel()])
            offset += _width(shard, self.topology.replicas)

    def _pass_on(self, item: SharedParameter) -> None:
        shard = self.shards.of(item.canonical)
        if shard is None:
            super()._pass_on(item)
            return
        shard.whole.grad = None  # only the first owner's was reduced
        self._share_first(item, shard.own)


def _width(shard: Shard, replicas: int) -> int:
    """Elements of each replica's rows, with those that fill them up."""
    return rows_each(len(shard.whole), replicas) * (shard.whole.numel() // max(1, len(shard.whole)))


def _add(shard: Shard, mean: torch.Tensor) -> None:
    rows = mean.view(shard.part.shape).clone()
    if shard.own.grad is None:
        shard.own.grad = as_gradient(rows, shard.own)
    else:
        shard.own.grad.add_(as_gradient(rows, shard.own))


def make_reducer(
    topology: Topology,
    stages: LocalStages,
    owners: Mapping[str, Sequence[int]],
    shards: Shards | None,
) -> Reducer | None:
    """What averages gradients over replicas; None where there is one.

    Args:
        stages: with the weights gathered.
    """
    if topology.replicas == 1:
        return None
    placed = {
        name: tuple(sorted({topology.rank_of(stage) for stage in stages}))
        for name, stages in owners.items()
    }
    common = topology, stages.unshared(), stages.shared, placed
    return Reducer(*common) if shards is None else ShardReducer(*common, shards=shards)


def blocks_by_stage(reducer: Reducer | None) -> dict[int, StageBlocks]:
    """What gathers the blocks of each stage, for those that have any."""
    found: dict[int, list[Group]] = {}
    if not isinstance(reducer, ShardReducer):
        return {}
    for group in reducer.shards.groups:
        if group.is_block:
            found.setdefault(group.stage, []).append(group)
    return {stage: StageBlocks(own, reducer.reduce_block) for stage, own in found.items()}
