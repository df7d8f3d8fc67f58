"""Which sums the engine of a backward makes, and which of them it makes in place.

Where several gradients of one value meet, the engine adds each to the sum so far as soon as it is
made. It adds in place where nobody else holds that sum (`can_accumulate_inplace` in
torch/csrc/autograd/input_buffer.cpp), but never while a dispatch mode looks on: a run that is
watched takes more memory than one that is not. So the watch does what the engine would have done.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, Node

from gpipe_compiler.passes.watch import DispatchWatch

_ADD = torch.ops.aten.add.Tensor

_ENDS = 2**63
"""Nodes that add to the gradient of a leaf have a sequence number from here on; others have one of
their own below it."""

Slot = tuple[Hashable, int]
"""The identity of a node, and the number of one of its gradients."""

Counts = tuple[int, int]
"""How often a tensor is held, and how often its storage."""


class EngineSums:
    """Follows a backward node by node.

    A sum is the engine's when the node that has just run leads to where a gradient waits already,
    and what is added to was made before that node.
    """

    def __init__(self) -> None:
        self._held_once = _held_once()
        self._slots: dict[int, tuple[Slot, ...]] = {}
        self._filled: set[Slot] = set()
        self._task = self._node = -1
        self._expected = 0
        self._doubled = False
        self._made: set[int] = set()

    def walk(self, roots: Iterable[GradientEdge]) -> None:
        """Learn the graph of the backward that is to come; none of it is held."""
        pending = [root.node for root in roots]
        while pending:
            node = pending.pop()
            number = node._sequence_nr()
            if number in self._slots or number >= _ENDS:
                continue
            edges = [(target, place) for target, place in node.next_functions if target]
            self._slots[number] = tuple((_key(target), place) for target, place in edges)
            pending.extend(target for target, _ in edges)

    def forget(self) -> None:
        """The backward is over."""
        self._slots.clear()
        self._filled.clear()

    def enter(self, node: Node) -> bool:
        """Notes the node that runs; returns whether it is another one than before."""
        number = node._sequence_nr()
        if number == self._node:
            return False
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._filled.clear()
        self._node = number
        self._made.clear()
        self._expected, self._doubled = 0, False
        fresh: set[Slot] = set()
        for slot in self._slots.get(number, ()):
            self._expected += slot in self._filled or slot in fresh
            self._doubled |= slot in fresh
            fresh.add(slot)
        self._filled |= fresh
        return True

    def made(self, tensor: torch.Tensor) -> None:
        """The node at work has made a tensor."""
        self._made.add(id(tensor))

    def is_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether this call is a sum that the engine would make in place."""
        if func is not _ADD or not self._expected or len(args) != 2 or kwargs:
            return False
        total, summand = args
        if not (isinstance(total, torch.Tensor) and isinstance(summand, torch.Tensor)):
            return False
        if id(total) in self._made and not self._doubled:
            return False
        self._expected -= 1
        return self.held_once(total)

    def is_own(self, tensor: object) -> bool:
        """Whether the running node or op has made a tensor, and it has the only reference."""
        return (
            isinstance(tensor, torch.Tensor) and id(tensor) in self._made and self.held_once(tensor)
        )

    def held_once(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is dense, and torch's own code has the only reference."""
        strided = tensor.layout is torch.strided  # a sparse one has no storage to ask
        return (
            strided
            and _counts(tensor) == self._held_once
            and is_non_overlapping_and_dense_or_false(tensor)
        )

    def begin(self) -> None:
        """An op of a forward begins, which has made nothing yet."""
        self._made.clear()


def _key(node: Node) -> Hashable:
    number = node._sequence_nr()
    return number if number < _ENDS else ("leaf", id(getattr(node, "variable", node)))


def _counts(tensor: torch.Tensor) -> Counts:
    storage = tensor.untyped_storage()
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # of C++, not in the stubs
    return count, torch._C._storage_Use_Count(storage._cdata)


class _Look(DispatchWatch):
    """Takes down the counts of the first argument of a sum, as `is_in_place` would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Counts] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _ADD:
            self.found.append(self._ask(args))
        return func(*args, **(kwargs or {}))

    def _ask(self, args: tuple[Any, ...]) -> Counts:
        total, _ = args
        return _counts(total)


@cache
def _held_once() -> Counts:
    """The reference counts of a sum that only the engine refers to."""
    look = _Look()
    with FakeTensorMode(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        value = torch.empty(2, requires_grad=True).exp()
        result = (value.sin() * value.cos()).sum()
        with look:
            torch.autograd.backward(result)
    (counts,) = look.found
    return counts
