"""Reads of what was stored into a part of a tensor, made reads of the value that was stored.

A loop that fills a tensor step by step and reads its own last step, `out[:, t] = f(out[:, t - 1])`,
ties all its ops together, as what is written in place cannot be cut apart. Where all elements of a
read come from one store, whose value nobody changes, the value itself is read: the same numbers,
and only the stores stay together. Tensors that are only stored into go.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, Mode, Op, Ref, called
from gpipe_compiler.ir.ops import reading, records_gradients
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.observe import Form, Storage, observed
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.simplify import only_asks, without_idle
from gpipe_compiler.passes.verbs import FILLED, changes_form
from gpipe_compiler.runtime.spec import Precision

_MOST_ELEMENTS = 2**24
"""Of a tensor whose parts are followed."""

_Read = tuple[str, str]
"""An op, and a value that it reads."""

_Stored = tuple[str, torch.dtype]
"""The value that is in it, and the type in which."""


def read_stores(graph: Graph) -> Graph:
    """The annotated graph, reading what was stored instead of the parts it was stored into.

    Only where that is so for the graph's samples and for twice as many, in every precision that the
    graph is for. Where a value has another type in one of them, it is cast as by the store.
    """
    if not any(map(_target, graph.ops)):
        return graph
    found = effects(graph)
    same: dict[_Read, _Stored] | None = None
    cast: set[str] = set()
    for precision in (known for known in Precision if known not in graph.unlike):
        for samples in (graph.batch_size, 2 * graph.batch_size):
            run = _Following(graph.replace(precision=precision), found, samples)
            reads = run.reads()
            known = reads if same is None else same
            same = {read: stored for read, stored in known.items() if reads.get(read) == stored}
            cast |= {v for v, dtype in same.values() if run.final[v].dtype is not dtype}
    same = same or {}
    # A value that is cast before the store has its gradients added up in the type of the tensor.
    types = {value: dtype for value, dtype in same.values() if value in cast}
    if not same or any(types.get(value, dtype) is not dtype for value, dtype in same.values()):
        return graph
    ops: list[Op] = []
    names = {name for op in graph.ops for name in (op.name, *op.outputs)}
    casts: dict[str, str] = {}
    for op in graph.ops:
        renamed = {v: same[op.name, v][0] for v in op.inputs if (op.name, v) in same}
        target = _target(op)
        if target is not None and target[2] in types:
            value = target[2]
            if value not in casts:
                wishes = (f"{value}_stored_{number}" for number in itertools.count(1))
                casts[value] = next(wish for wish in wishes if wish not in names)
                call = MethodCall("to", (Ref(value), types[value]))
                ops.append(
                    dataclasses.replace(
                        op, name=casts[value], call=call, result=casts[value], seen=()
                    )
                )
            renamed[value] = value
        renamed = {old: casts.get(new, new) for old, new in renamed.items()}
        ops.append(reading(op, renamed))
    left = without_idle(graph, ops, lambda op: _is_view(found, op))
    return annotate(graph.replace(ops=left, values={}), graph.batch_size, graph.precision)


def _target(op: Op) -> tuple[str, object, str] | None:
    """The tensor that an op stores into, the index of the part or None, and the stored value."""
    match op.call:
        case MethodCall(method="copy_", args=(Ref(name=view), Ref(name=value)), kwargs=kwargs):
            return None if kwargs else (view, None, value)
        case FunctionCall(function=operator.setitem, args=(Ref(name=base), index, Ref(name=value))):
            return base, index, value
    return None


class _Part(NamedTuple):
    """A tensor as a part of its memory: sizes, strides and offset in elements."""

    memory: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, form: Form, memory: Storage) -> _Part:
        return cls(memory, form.shape, form.stride, form.offset, form.dtype)

    def among(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        strides = [step * elements.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(elements[self.offset :], self.shape, strides)

    def at(self, index: object) -> _Part | None:
        """What an index takes of it; None for a copy."""
        if not all(item in (None, ...) or type(item) is int for item in _flat(index)):
            return None
        whole = torch.empty(self.memory.bytes // self.dtype.itemsize, device="meta")
        part = whole.as_strided(self.shape, self.stride, self.offset)[index]  # type: ignore[index]  # as the model does
        return self._replace(
            shape=tuple(part.shape), stride=part.stride(), offset=int(part.storage_offset())
        )


class _Following:
    """One run, in which it is noted which store every element comes from."""

    def __init__(self, graph: Graph, found: Effects, samples: int) -> None:
        self.graph, self.found = graph, found
        seen = observed(graph, samples).tensors
        self.final = {name: _Part.of(form, memory) for name, form, memory in seen}
        ops = (op for op in graph.ops if op.mode is Mode.ALWAYS)
        changed = (value for op in graph.ops if changes_form(op) for value in op.inputs)
        self.changed = {self._memory(value) for value in changed}
        self.targets = {op.name: target for op in ops if (target := _target(op)) is not None}

    def reads(self) -> Mapping[_Read, _Stored]:
        """For every read that a single store accounts for, what it stored."""
        found: dict[_Read, _Stored] = {}
        owner: dict[Storage, npt.NDArray[np.int64]] = {}
        stores: list[tuple[_Part, str]] = []
        for op in self.graph.ops:
            written = self.found.writes.get(op.name, frozenset())
            for value in op.inputs if op.mode is Mode.ALWAYS else ():
                part = self.final.get(value)
                if part is None or part.memory not in owner or value in written:
                    continue
                if any(self._memory(name) == part.memory for name in op.outputs):
                    continue  # a view, which reads nothing yet
                numbers = part.among(owner[part.memory]).reshape(-1)
                number = int(numbers[0]) if len(numbers) else -1
                if number >= 0 and bool((numbers == number).all()) and stores[number][0] == part:
                    found[op.name, value] = stores[number][1], part.dtype
            keys = {self._memory(name) for name in written} - {None}
            stored = self._stored(op)
            for key in keys:
                if key in owner:
                    owner[key][:] = -1 if stored is None or stored[0].memory != key else owner[key]
            if stored is not None and stored[0].memory in keys:
                part = stored[0]
                elements = owner.get(part.memory)
                if elements is None:
                    elements = self._elements(part.memory)
                if elements is not None:
                    owner[part.memory] = elements
                    part.among(elements)[...] = len(stores)
                    stores.append(stored)
        return found

    def _memory(self, value: str) -> Storage | None:
        part = self.final.get(value)
        return None if part is None else part.memory

    def _elements(self, memory: Storage) -> npt.NDArray[np.int64] | None:
        """-1 for every element of a memory that may be followed: all see it as the same type."""
        names = [name for name, part in self.final.items() if part.memory == memory]
        dtype, *others = {self.final[name].dtype for name in names}
        makers = [self.graph.producer.get(name) for name in names]
        other = any(maker is None or maker.mode is not Mode.ALWAYS for maker in makers)
        count = memory.bytes // dtype.itemsize
        if others or other or count > _MOST_ELEMENTS:
            return None
        return np.full(count, -1, dtype=np.int64)

    def _stored(self, op: Op) -> tuple[_Part, str] | None:
        """The part that an op stores a value into as it is, and the value, which nobody changes."""
        target = self.targets.get(op.name)
        if target is None:
            return None
        name, index, value = target
        part, given = self.final.get(name), self.final.get(value)
        if part is None or given is None or part.memory in self.changed:
            return None
        if index is not None:
            part = part.at(index)
        changes = self.found.alias_set(value) & self.found.written_values
        stops = self.graph.values[value].requires_grad and not records_gradients(op)
        if part is None or changes or stops or given.shape != part.shape:
            return None
        floating = given.dtype.is_floating_point and part.dtype.is_floating_point
        return (part, value) if floating or given.dtype is part.dtype else None


def _flat(index: object) -> list[object]:
    match index:
        case tuple():
            return [leaf for item in index for leaf in _flat(item)]
        case slice():
            return [index.start, index.stop, index.step]
    return [index]


def without_unread_stores(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph without tensors that are only written into, as caches are in eval mode.

    Not annotated; itself where there are none.
    """
    if not any(map(_target, graph.ops)):
        return graph
    found = effects(graph)
    dead: set[str] = set()
    for op in graph.ops:
        if called(op.call) in FILLED - {"rand_like"} and len(op.outputs) == 1:
            only_written = _only_written(graph, found, op.outputs[0])
            dead |= only_written if only_written.isdisjoint(kept) else set()
    if not dead:
        return graph

    def is_idle(op: Op) -> bool:
        return op.name not in kept and (_is_view(found, op) or only_asks(graph, op))

    ops = [op for op in graph.ops if op.name not in dead]
    return graph.replace(ops=without_idle(graph, ops, is_idle), values={})


def _only_written(graph: Graph, found: Effects, value: str) -> set[str]:
    """The ops that make, view and write a tensor, where no others read it; else none."""
    shared = found.alias_set(value)
    inside = {graph.producer[name].name for name in shared if name in graph.producer}
    for name in shared:
        if name not in graph.producer or name in graph.ends or found.state_aliases.get(name):
            return set()
        for op in (graph.producer[name], *graph.consumers.get(name, ())):
            writes = found.writes.get(op.name, frozenset())
            touched = {*op.outputs, *writes}
            if not touched or not touched <= shared or found.state_writes.get(op.name):
                return set()
            inside.add(op.name)
    return inside if any(found.writes.get(name) for name in inside) else set()


def _is_view(found: Effects, op: Op) -> bool:
    """Whether an op returns memory of what it reads, and does nothing else."""
    outputs = {other for name in op.outputs for other in found.alias_set(name)}
    return not outputs.isdisjoint(op.inputs) and op.name not in found.writes
