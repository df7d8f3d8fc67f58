"""Notes what the aten ops do that the ops of a graph run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpipe_compiler.ir.arguments import storage_key, tensors_in
from gpipe_compiler.runtime.core.random import draws

_UNDECLARED: Mapping[torch._ops.OpOverload, tuple[tuple[int, ...], int]] = {
    torch.ops.aten.native_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.cudnn_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.miopen_batch_norm.default: ((3, 4), 5),
}
"""Ops that write although their schema does not say so: positions of the written arguments, and
of the flag (training) with which they do."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """An aten op that ran: how many elements it read and returned, tensor by tensor.

    Attributes:
        returned: of the first tensor and of all floating ones: some attention kernels return the
            state of a random generator besides.
    """

    name: str
    read: tuple[int, ...]
    returned: tuple[int, ...]


@dataclass(slots=True)
class OpNotes:
    """What is noted of one op; storages by their keys.

    Attributes:
        ran: kernels so far; views and casts of state are none.
        kernels_before: of these, those before the latest tensor was saved.
        most: bytes above those before the op, at most.
    """

    before: int
    written: set[int] = field(default_factory=set)
    saved: dict[int, None] = field(default_factory=dict)
    kernels: list[KernelRun] = field(default_factory=list)
    drawn: list[tuple[int, ...]] = field(default_factory=list)
    ran: int = 0
    kernels_before: int = 0
    most: int = 0
    kept: int = 0


class OpWatch:
    """Notes the kernels of a run, op after op.

    Attributes:
        own: the storages of the model's state, and of what is cast of them to another type.
        alive: those that autograd keeps, by the first op that it keeps them for. With what is cast
            they are kept here, for their keys to stay their own.
    """

    def __init__(self, states: Iterable[torch.Tensor]) -> None:
        self.own = {storage_key(tensor) for tensor in states}
        self.alive: dict[str, list[torch.UntypedStorage]] = {}
        self._casts: list[torch.Tensor] = []
        self._saved: list[tuple[str, torch.Tensor, int]] = []
        self._kept: set[int] = set()
        self._held = 0
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made: set[int] = set()
        self._op = ""
        self._notes = OpNotes(0)

    def begin(self, op: str) -> OpNotes:
        self._made.clear()
        self._op = op
        self._notes = OpNotes(self._held)
        return self._notes

    def end(self, returned: object) -> None:
        made = {storage_key(tensor) for tensor in tensors_in(returned)} & self._made
        values = sum(self._sizes[key] for key in made)
        self._notes.kept = self._held - self._notes.before - values

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor."""
        key, notes = storage_key(tensor), self._notes
        if key not in self._kept:
            self._kept.add(key)
            self.alive.setdefault(self._op, []).append(tensor.untyped_storage())
        notes.saved[key] = None
        self._saved.append((self._op, tensor, tensor._version))
        notes.kernels_before = notes.ran
        return tensor

    def overwritten(self) -> frozenset[str]:
        """The ops of which autograd has kept a tensor that was written to since: their backward
        would raise. To be asked once, at the end: it releases these tensors."""
        saved, self._saved = self._saved, []
        return frozenset(op for op, tensor, version in saved if tensor._version != version)

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        notes = self._notes
        results = tensors_in(returned)
        notes.written.update(map(storage_key, tensors_in(written_by(func, args, kwargs))))
        if draws(func, args, kwargs):
            notes.drawn.append(tuple(results[0].shape))
        meant = [t for t in results if t is results[0] or t.dtype.is_floating_point]
        read = _numbers(tensors_in((args, kwargs)))
        notes.kernels.append(KernelRun(func.overloadpacket.__name__, read, _numbers(meant)))
        if func is not torch.ops.aten._to_copy.default:
            notes.ran += not func.is_view
        elif storage_key(args[0]) in self.own:
            self.own.update(map(storage_key, results))
            self._casts.extend(results)
        for tensor in results:
            key = storage_key(tensor)
            if key not in self.own and key not in self._sizes:
                self._add_made(key, tensor.untyped_storage())

    def _add_made(self, key: int, storage: torch.UntypedStorage) -> None:
        size = self._sizes[key] = storage.nbytes()
        self._made.add(key)
        self._held += size
        self._notes.most = max(self._notes.most, self._held - self._notes.before)

        def gone(_: object) -> None:
            del self._sizes[key], self._ends[key]
            self._made.discard(key)
            self._held -= size

        self._ends[key] = weakref.ref(storage, gone)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[object]:
    """The arguments of an aten op that it writes to, in nests."""
    if func in _UNDECLARED:
        positions, flag = _UNDECLARED[func]
        return [args[position] for position in positions] if args[flag] else []
    written: list[object] = []
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                by_position = position < len(args) and not argument.kwarg_only
                written.append(args[position] if by_position else kwargs.get(argument.name))
    return written


def _numbers(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)
