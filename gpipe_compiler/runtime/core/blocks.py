"""Blocks of a stage whose weights are gathered for every micro-batch, as they are computed with.

While a stage runs, a block is gathered when an op is given one of its weights, and freed when an
op is given those of another block. In the backward the blocks come in the opposite order, and on
every replica in the same: one is gathered, then its gradients are reduced, then the next one comes.
So replicas wait for one another in one order, also where some of them lack a gradient. What a block
is given after it was reduced stays with its weights, and is reduced when the step ends.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .shards import Group, Shard

Reduce = Callable[[Sequence[Shard]], None]
"""Gives the gradients of some parameters to the replicas that own their rows."""


Storages = dict[int, tuple[torch.UntypedStorage, Group, nn.Parameter]]
"""Where weights lie when they are gathered, by identity."""


@dataclass(slots=True)
class _Pass:
    """What the forward of a micro-batch has used.

    Attributes:
        order: its blocks, by their last use.
        missing: for each of them, the parameters whose gradients have not come.
        nodes: for each of them, how many parts of the backward that read its weights have not run.
    """

    order: list[Group] = field(default_factory=list)
    missing: dict[Group, set[int]] = field(default_factory=dict)
    nodes: Counter[Group] = field(default_factory=Counter)

    def is_done(self, group: Group) -> bool:
        """Whether the backward needs a block no more."""
        return not (self.missing[group] or self.nodes[group])


class StageBlocks:
    """The blocks of one stage in one process."""

    def __init__(self, groups: Sequence[Group], reduce: Reduce) -> None:
        self._groups = groups
        self._reduce = reduce
        self._passes: dict[int, _Pass] = {}
        self._now = _Pass()
        self._turn: Sequence[Group] | None = None
        self._gathered = self._reduced = 0
        storages: Storages = {}
        for group in groups:
            for shard in group.shards:
                storage = shard.whole.untyped_storage()
                storages[id(storage)] = storage, group, shard.whole
                came = partial(self._came, group)
                shard.whole.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]  # torch
        self._watched = partial(_Watched, storages, self)

    @contextlib.contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around a forward of the stage, its loss included."""
        self._now = self._passes[microbatch] = _Pass()
        try:
            with self._watched():
                yield
        finally:
            self._free()

    def again(self) -> contextlib.AbstractContextManager[object]:
        """Around a part of a forward that runs a second time within a backward."""
        return self._watched()

    @contextlib.contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Around a backward of a micro-batch, which every replica has, also without gradients."""
        self._now = self._passes.pop(microbatch)
        self._turn = self._now.order[::-1]
        self._gathered = self._reduced = 0
        try:
            yield
            self._advance(len(self._turn))
            self._reduce_last()
        finally:
            self._turn = None
            self._free()

    def before(self, groups: Sequence[Group]) -> None:
        """Before an op that is given weights of these blocks."""
        if self._turn is not None:
            self._advance(max((self._place(group) for group in groups), default=0))
            return
        for group in self._groups:
            if group not in groups:
                group.free()
        for group in groups:
            group.gather()

    def after(self, groups: Sequence[Group], weights: Sequence[nn.Parameter], made: object) -> None:
        """After such an op.

        Args:
            weights: of these blocks, of which it was given something.
        """
        if self._turn is not None or not torch.is_grad_enabled():
            return
        now = self._now
        given = {id(weight) for weight in weights}
        for group in groups:
            if group in now.order:
                now.order.remove(group)
            now.order.append(group)
            own = {id(shard.whole) for shard in group.shards}
            now.missing.setdefault(group, set()).update(given & own)
        for tensor in _tensors(made):
            if tensor.grad_fn is not None:
                now.nodes.update(groups)
                tensor.grad_fn.register_prehook(partial(self._node, now, groups))

    def _node(self, of: _Pass, groups: Sequence[Group], *_: object) -> None:
        """Before a part of the backward that reads weights."""
        of.nodes.subtract(groups)
        if of is self._now:
            self.before(groups)

    def _came(self, group: Group, parameter: nn.Parameter) -> None:
        """After the gradient of a parameter has come."""
        if self._turn is None or group not in self._now.missing:
            return
        self._now.missing[group].discard(id(parameter))
        if self._now.is_done(group):
            if self._place(group) == self._gathered:
                self._reduce_last()
            group.free()

    def _place(self, group: Group) -> int:
        """How many blocks are gathered in this backward when this one is."""
        assert self._turn is not None
        return self._turn.index(group) + 1 if group in self._turn else 0

    def _advance(self, count: int) -> None:
        assert self._turn is not None
        while self._gathered < count:
            self._reduce_last()
            for group in self._turn[: self._gathered]:
                if self._now.is_done(group):
                    group.free()
            self._turn[self._gathered].gather()
            self._gathered += 1

    def _reduce_last(self) -> None:
        assert self._turn is not None
        if self._reduced < self._gathered:
            self._reduced += 1
            self._reduce(self._turn[self._reduced - 1].shards)

    def _free(self) -> None:
        for group in self._groups:
            group.free()


class _Watched(TorchFunctionMode):
    """Tells the blocks of a stage before an op is given their weights, and after."""

    def __init__(self, storages: Storages, blocks: StageBlocks) -> None:
        super().__init__()
        self._storages = storages
        self._blocks = blocks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # what is asked of a tensor, as its shape
            return func(*args, **kwargs)
        weights: list[nn.Parameter] = []
        groups: dict[Group, None] = {}
        for tensor in _tensors((args, kwargs)):
            if tensor.layout is torch.strided:
                known = self._storages.get(id(tensor.untyped_storage()))
                if known is not None:
                    weights.append(known[2])
                    groups[known[1]] = None
        if not groups:
            return func(*args, **kwargs)
        self._blocks.before(tuple(groups))
        made = func(*args, **kwargs)
        self._blocks.after(tuple(groups), weights, made)
        return made


def _tensors(item: object) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, dict):
        yield from _tensors(tuple(item.values()))
