"""Observes the allocation and the end of every storage."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import Node

from gpipe_compiler.passes.allocation_trace import NO_OP, BlockKind, StorageEvent, StorageLife
from gpipe_compiler.passes.fakes import DEVICE, HostFakes
from gpipe_compiler.passes.memory_trace.unwatched import (
    REPLAYED,
    EngineSums,
    formula_in_place,
    of_sparse,
    parts,
    sparse,
    storage_bytes,
)

_aten = torch.ops.aten
_NO_BLOCK = -1
"""In place of the number of a block, for the storages of the model's state."""
_ACCUMULATES = "torch::autograd::AccumulateGrad"


class StorageWatch(HostFakes):
    """A mode of fake tensors in which every storage that an aten op makes, once it has begun, is a
    block, and its end is seen too.

    A storage ends when the last tensor that looks into it does, wherever that was held: in Python,
    by autograd, by the engine of the backward. Storages without any bytes are no blocks. What a
    kernel takes and gives back within itself is not seen.

    What a parameter takes over as its first gradient it would hold from then on. It is given a
    stand-in that is no block: so the end of a gradient is seen, as it comes where another is there
    that it is added to.

    Attributes:
        born: all blocks, by number: activations where an op of the forward made them, for the first
            time or again.
        op: position of the running op; None in a backward, where it follows from the node.
        taken_over: the blocks that parameters have taken over as their gradients.
        sparse: those of them that lie in sparse gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken_over: set[int] = set()
        self.sparse: set[int] = set()
        self.events: list[StorageEvent] = []
        self.born: list[StorageLife] = []
        self.op: int | None = NO_OP
        self.sums = EngineSums()
        self._numbers: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = NO_OP
        self._starts: list[int] = []
        self._positions: list[int] = []
        self._blind: bool = True
        self._adds_in_place = False
        self._written: list[weakref.ref[torch.Tensor]] = []
        self._node = ""

    def start(self, position: int, *, adds_in_place: bool) -> None:
        """An op of a forward begins: the nodes that autograd makes from here on are its own."""
        self._settle_views()
        self.sums.begin()
        self._adds_in_place = adds_in_place
        self.op = self._now = position
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._positions.append(position)

    def start_again(self, position: int, *, adds_in_place: bool) -> None:
        """An op runs once more within a backward."""
        self._adds_in_place = adds_in_place
        self.op = self._now = position

    def rest(self) -> None:
        """No op is at work."""
        self._settle_views()
        self.op = self._now = NO_OP

    def _settle_views(self) -> None:
        """Has the gradients of views that were written to copied, as those of real tensors are."""
        written, self._written = self._written, []
        for reference in written:
            view = reference()
            node = None if view is None or not view.requires_grad else view.grad_fn
            if node is not None and node.name() in REPLAYED:
                node.register_prehook(_copied)

    def follow_nodes(self) -> None:
        """A backward runs: the nodes tell for which op."""
        self.op = None

    def take(self) -> tuple[StorageEvent, ...]:
        """The events since they were last taken."""
        events, self.events = self.events, []
        return tuple(events)

    def begin(self, states: Iterable[torch.Tensor]) -> None:
        """What is made from here on is seen. These tensors are the model's own, and no blocks."""
        self._leave_out(states)
        self._blind = False

    def _leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._numbers[tensor.untyped_storage()._cdata] = _NO_BLOCK

    def form(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this one that is no block."""
        with self._unseen():
            return torch.empty_like(tensor, device="meta", requires_grad=False)

    def adopt(self, form: torch.Tensor) -> torch.Tensor:
        """A tensor of this form that comes from elsewhere: a block whose beginning is no event."""
        with self._unseen():
            tensor = torch.empty_like(form, device="cpu", requires_grad=False)
        storage = tensor.untyped_storage()
        self._add(storage, tensor, storage.nbytes(), event=False)
        return tensor

    def number(self, tensor: torch.Tensor) -> int | None:
        """The block that a tensor looks into; None for the model's state and for nothing at all."""
        number = self._numbers.get(tensor.untyped_storage()._cdata, _NO_BLOCK)
        return None if number == _NO_BLOCK else number

    def alive(self) -> frozenset[int]:
        return frozenset(self._ends)

    def forget(self) -> None:
        """Stops observing."""
        self._ends.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Runs the op on fake tensors, and notes what it makes."""
        if self.op is None and not self._blind:
            self._look_at_node()  # some nodes do nothing but ask for a device
        if self._blind or func is DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        func, kwargs = self._unwatched(func, args, kwargs)
        self._blind = True  # kernels may run others
        try:
            stand_in = self._taken_over(func, args) if self.op is None else None
            if stand_in is not None:
                return stand_in
            returned: object = of_sparse(func, args) if self.op is None else None
            if returned is None:
                returned = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._blind = False
        mask = _masked(func)
        if mask is not None:
            returned = _wanted(returned, args[mask])
        if isinstance(returned, torch.Tensor):
            self._note(returned, storage_bytes(func, args))
        elif isinstance(returned, list | tuple):
            for item in returned:
                if isinstance(item, torch.Tensor):
                    self._note(item)
        return returned

    def _taken_over(self, func: Any, args: Sequence[Any]) -> torch.Tensor | None:
        """The stand-in for the gradient that a parameter takes over; None where it does not.

        That is by `detach`; a sparse one is copied while a dispatch mode looks on, and only then.
        """
        if func not in (_aten.detach.default, _aten.clone.default) or not self._is_for_state():
            return None
        gradient: torch.Tensor = args[0]
        if (func is _aten.clone.default) is not gradient.is_sparse:
            return None
        numbers = {n for n in map(self.number, parts(gradient)) if n is not None}
        self.taken_over |= numbers
        if not numbers:
            return None
        # A clone has the strides of `empty_like`, which torch's fakes take ten times as long for.
        instead = [self._clone(part) for part in parts(gradient)]
        self._leave_out(instead)
        if not gradient.is_sparse:
            return instead[0]
        self.sparse |= numbers
        indices, values = instead
        return sparse(indices, values, gradient)

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        made = super().__torch_dispatch__(_aten.clone.default, (type(tensor),), (tensor,))
        assert isinstance(made, torch.Tensor)
        return made

    def _is_for_state(self) -> bool:
        """Whether the node at work adds to the gradient of the model's state, and not to that of
        what a stage is given."""
        node: Any = torch._C._current_autograd_node()
        if node is None or node.name() != _ACCUMULATES:
            return False
        return self._numbers.get(node.variable.untyped_storage()._cdata) == _NO_BLOCK

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        self._blind = True
        try:
            yield
        finally:
            self._blind = False

    def _unwatched(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[Any, Mapping[str, Any] | None]:
        if self.op is None:
            if self.sums.is_in_place(func, args, kwargs):
                return _aten.add_.Tensor, None
            instead = formula_in_place(self._node, func)
            if instead is not None and self.sums.is_own(args[0]):
                return instead, kwargs
        elif func is _aten.add.Tensor and self._adds_in_place and self.sums.is_own(args[0]):
            return _aten.add_.Tensor, kwargs
        elif _writes(func) and args and args[0]._is_view():
            self._written.append(weakref.ref(args[0]))
        return func, kwargs

    def _note(self, tensor: torch.Tensor, size: int | None = None) -> None:
        self.sums.made(tensor)
        for part in parts(tensor):
            if part.layout is not torch.strided:
                continue
            storage = part.untyped_storage()
            if storage._cdata not in self._numbers:
                self._add(storage, part, storage.nbytes() if size is None else size, event=True)

    def _add(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, size: int, *, event: bool
    ) -> None:
        if not size:
            return
        number = len(self.born)
        shape = "x".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        for_op = self.op is not None and self.op != NO_OP
        kind = BlockKind.ACTIVATION if for_op else BlockKind.GRADIENT
        self.born.append(StorageLife(size, kind, self._now, shape, dtype))
        key = storage._cdata
        self._numbers[key] = number
        self._ends[number] = weakref.ref(storage, partial(self._end, key, number))
        if event:
            self.events.append(StorageEvent(number, True, self._now))

    def _end(self, key: int, number: int, _: object) -> None:
        self._numbers.pop(key, None)
        if self._ends.pop(number, None) is not None:
            self.events.append(StorageEvent(number, False, self._now))

    def _look_at_node(self) -> None:
        node: Node | None = torch._C._current_autograd_node()
        if node is None:
            self._now = NO_OP
            return
        if not self.sums.enter(node):
            return
        self._node = node.name()
        if self._node != _ACCUMULATES:
            # What adds to the gradient of a parameter works for the op that made it just before.
            place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
            self._now = self._positions[place] if place >= 0 else NO_OP


@cache
def _masked(func: Any) -> int | None:
    """The position of `output_mask` among the arguments, where there is one."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


@cache
def _writes(func: Any) -> bool:
    """Whether an op writes to its first argument and returns it."""
    first = next(iter(func._schema.arguments), None)
    return bool(first and first.alias_info and first.alias_info.is_write and func._schema.returns)


def _copied(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if item is None else torch.empty_like(item) for item in gradients)


def _wanted(returned: object, mask: Sequence[bool]) -> object:
    """What a real kernel returns: nothing that is not wanted, which fake ones may make."""
    if not isinstance(returned, tuple) or len(returned) != len(mask):
        return returned
    return tuple(result if wanted else None for result, wanted in zip(returned, mask, strict=True))
