"""Describes every value of a graph: kind, shape, dtype, batch dimension, gradient, storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.ir import Graph, Value, ValueKind
from gpipe_compiler.ir.legality import check
from gpipe_compiler.passes.blocks import Blocks, IrregularError, settled
from gpipe_compiler.passes.dry_run import modes, storage_key
from gpipe_compiler.passes.effects import WatchedRun, effects
from gpipe_compiler.passes.own_inputs import own_inputs, written_inputs
from gpipe_compiler.passes.precedence import must_run_in_place
from gpipe_compiler.passes.repeats import repeats
from gpipe_compiler.runtime.spec import Precision


def annotate(graph: Graph, batch_size: int, precision: Precision = Precision.FP32) -> Graph:
    """The graph with `values` filled in for `batch_size` samples.

    It runs on fake tensors with `batch_size` and with twice as many samples. A dimension that
    doubles is the batch dimension; a value with several such dimensions, or one that changes in
    another way, cannot be split. Ops are run in the graph's own mode (train when it has a loss),
    those guarded by the other mode in that mode. Inputs need no gradient.

    `Graph.held` is filled in too, from the writes in place, and inputs that are written in place
    are copied first (`own_inputs`).

    Args:
        graph: with an example of every input; what `values` holds is replaced.
        batch_size: samples, at least 1. It is typically a micro-batch, but any size will do.
        precision: in which this and all further analyses run the ops.

    Raises:
        ModelError: naming the op that cannot run on so many samples.
    """
    stretches = graph.repeats or repeats(graph)
    graph = graph.replace(precision=precision, repeats=())
    described = None
    if stretches:
        whole = graph.replace(repeats=stretches)
        described = _by_blocks(Blocks(whole), batch_size)
        graph = graph if described is None else whole
    if described is None:
        described = _described(graph, batch_size)
    annotated = graph.replace(values=described.values, batch_size=batch_size)
    found = effects(annotated, described.once)
    written = written_inputs(annotated, found)
    if written:
        return annotate(own_inputs(graph, written), batch_size, precision)
    held = must_run_in_place(annotated, found)
    return check(annotated.replace(held=held), after="shapes")


@dataclass(frozen=True, eq=False, slots=True)
class _Described:
    """All values described.

    Attributes:
        once: the runs with the asked batch size, of every mode.
        twice: the values in those with twice as many samples.
    """

    values: Mapping[str, Value]
    once: Sequence[WatchedRun]
    twice: Sequence[Mapping[str, Any]]


def _described(graph: Graph, batch_size: int) -> _Described:
    observed: dict[str, _Pair] = {}
    runs: list[WatchedRun] = []
    doubled: list[Mapping[str, Any]] = []
    numbers = _StorageNumbers()
    for training in modes(graph):
        runs.append(WatchedRun.of(graph, batch_size, training=training))
        once = runs[-1].environment
        twice = runs[-1].run.run(2 * batch_size)
        doubled.append(twice)
        fresh = {name: _Pair(once[name], twice[name]) for name in once if name not in observed}
        numbers.add(once, known=observed.keys() & once.keys())
        observed |= fresh
    values = {
        name: _describe(name, pair, batch_size, numbers.of.get(name, -1))
        for name, pair in observed.items()
    }
    return _Described(_in_order(graph, values), runs, doubled)


def _by_blocks(blocks: Blocks, batch_size: int) -> _Described | None:
    """All values described after those of the short graph; None where these do not tell."""
    short = blocks.short
    described = _described(short, batch_size)
    known = described.values
    environments = [*(run.environment for run in described.once), *described.twice]
    if not settled(blocks, environments):
        return None
    first: dict[int, str] = {}  # the first value in each memory
    for value in known.values():
        first.setdefault(value.storage, value.name)
    # Each value of the whole graph with the one that tells of it, and the first in its memory.
    rows = [(source.name, known[source.name], source.name) for source in blocks.graph.inputs]
    rows = [(name, value, first[value.storage]) for name, value, _ in rows]
    try:
        for op, told, meaning in blocks.known():
            for name, old in zip(op.outputs, short.op_of[told].outputs, strict=True):
                rows.append((name, known[old], meaning.value(first[known[old].storage])))
    except IrregularError:
        return None
    numbers: dict[str, int] = {}
    values = {
        name: dataclasses.replace(
            value,
            name=name,
            storage=-1 if value.storage < 0 else numbers.setdefault(memory, len(numbers)),
        )
        for name, value, memory in rows
    }
    return dataclasses.replace(described, values=values)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A value in the run with the asked batch size, and in the one with twice as many samples."""

    once: Any
    twice: Any


class _StorageNumbers:
    """Numbers the storages of all runs, so that values which share memory share a number."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self._count = 0

    def add(self, environment: Mapping[str, Any], known: set[str]) -> None:
        """Numbers the values of one run; those in `known` keep the numbers they have."""
        tensors = {n: storage_key(v) for n, v in environment.items() if _is_tensor(v)}
        number = {tensors[name]: self.of[name] for name in known & tensors.keys()}
        for name, key in tensors.items():
            if key not in number:
                number[key] = self._count
                self._count += 1
            self.of.setdefault(name, number[key])


def _describe(name: str, pair: _Pair, batch_size: int, storage: int) -> Value:
    tensor = pair.once
    if not _is_tensor(tensor):
        scalar = isinstance(tensor, bool | int | float | complex)
        return Value(name, ValueKind.SCALAR if scalar else ValueKind.OTHER)
    batch_dim, splittable = _batch_dim(tuple(tensor.shape), tuple(pair.twice.shape))
    return Value(
        name,
        ValueKind.TENSOR,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        batch_dim=batch_dim,
        splittable=splittable and (batch_dim is None or tensor.shape[batch_dim] % batch_size == 0),
        requires_grad=tensor.requires_grad,
        storage=storage,
    )


def _batch_dim(once: tuple[int, ...], twice: tuple[int, ...]) -> tuple[int | None, bool]:
    """The dimension that doubles, and whether it is the only one that changes."""
    if len(once) != len(twice):
        return None, False
    changed = [d for d in range(len(once)) if once[d] != twice[d]]
    if not changed:
        return None, True
    if len(changed) == 1 and twice[changed[0]] == 2 * once[changed[0]]:
        return changed[0], True
    return None, False


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _in_order(graph: Graph, values: Mapping[str, Value]) -> dict[str, Value]:
    """The table in the order of the graph: inputs, then results of ops."""
    names = [source.name for source in graph.inputs]
    names.extend(name for op in graph.ops for name in op.outputs)
    return {name: values[name] for name in names}
