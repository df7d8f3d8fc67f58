"""Describes every value of a graph: kind, shape, dtype, batch dimension, gradient, storage."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from gpipe_compiler.ir import Graph, MethodCall, Op, Ref, Value, ValueKind
from gpipe_compiler.ir.arguments import renamed
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.ops import reading
from gpipe_compiler.ir.repeats import repeats
from gpipe_compiler.ir.sizes import is_free
from gpipe_compiler.passes.effects import effects, must_run_in_place
from gpipe_compiler.passes.free_sizes import symbolic
from gpipe_compiler.passes.observe import ObservedRun, SeenValue, in_all_modes
from gpipe_compiler.passes.value_splits import sized_by_values
from gpipe_compiler.runtime.spec import Precision


def annotate(
    graph: Graph,
    batch_size: int,
    precision: Precision = Precision.FP32,
    *,
    alike: Mapping[str, Value] | None = None,
) -> Graph:
    """The graph with `values` filled in for `batch_size` samples.

    It runs on fake tensors with `batch_size` and with twice as many samples; where its values are
    described for another batch size, these tell what the second run would. A dimension that grows
    with the samples is the batch dimension; a value with several such dimensions, or one that
    changes in another way, cannot be split. Ops are run in the graph's own mode (train when it
    has a loss), those guarded by the other mode in that mode. Inputs need no gradient.

    `Graph.held` is filled in too, from the writes in place, and inputs that are written in place
    are copied first (`copy_written_inputs`).

    Args:
        graph: with an example of every input; what `values` holds is replaced.
        batch_size: samples, at least 1. It is typically a micro-batch, but any size will do.
        precision: in which this and all further analyses run the ops.
        alike: values of the same names, which are known to go with the batch as those of this graph
            do. It is then run at one size.

    Raises:
        ModelError: naming the op that cannot run on this number of samples.
    """
    described = {} if graph.batch_size == batch_size else graph.values
    shapes = {n: value.shape for n, value in described.items() if value.kind is ValueKind.TENSOR}
    other = graph.batch_size
    stretches = graph.repeats or repeats(graph)
    graph = graph.replace(precision=precision, repeats=stretches, batch_size=batch_size, values={})
    once = in_all_modes(graph, batch_size)
    runs = once
    dims: _Dims
    if alike is not None:
        dims = {n: (value.batch_dim, value.splittable) for n, value in alike.items()}
    else:
        if not _shapes(once).keys() <= shapes.keys():
            other = 2 * batch_size
            runs = [*once, *in_all_modes(graph, other)]
            shapes = _shapes(runs[len(once) :])
        dims = _batch_dims(once, shapes, batch_size, other)
    unknown = sized_by_values(graph)
    dims = {**dims, **dict.fromkeys(unknown & dims.keys(), (None, False))}
    values = _described(once, dims)
    for name, shape in symbolic(graph).shapes.items():
        if name in unknown:
            continue
        sizes = zip(shape, values[name].shape, strict=True)
        free = tuple(dim if is_free(dim) else size for dim, size in sizes)
        values[name] = replace(values[name], free=free)
    annotated = graph.replace(values=values)
    if not all(run.by_blocks for run in runs):
        annotated = annotated.replace(repeats=())
    found = effects(annotated)
    written = [s.name for s in graph.inputs if s.name in found.written_values]
    if written:
        return annotate(copy_written_inputs(graph, written), batch_size, precision)
    held = must_run_in_place(annotated, found)
    return check(annotated.replace(held=held), after="shapes")


_Dims: TypeAlias = Mapping[str, tuple[int | None, bool]]
"""Of tensors: the batch dimension, and whether it can be split."""


def _described(runs: Sequence[ObservedRun], dims: _Dims) -> dict[str, Value]:
    """All values, those that are made in one mode alone after the others."""
    values: dict[str, Value] = {}
    numbers: dict[str, int] = {}  # of storages, by value: the same in all runs
    count = 0
    for run in runs:
        of_storage = {storage: numbers[n] for n, _, storage in run.tensors if n in numbers}
        for name, _, storage in run.tensors:
            if storage not in of_storage:
                of_storage[storage] = count
                count += 1
            numbers.setdefault(name, of_storage[storage])
        for name, seen in run.values.items():
            if name not in values:
                values[name] = _describe(name, seen, dims, numbers.get(name, -1))
    return values


def _describe(name: str, seen: SeenValue, dims: _Dims, storage: int) -> Value:
    form = seen.form
    if form is None:
        scalar = isinstance(seen.plain, bool | int | float | complex)
        return Value(name, ValueKind.SCALAR if scalar else ValueKind.OTHER)
    batch_dim, splittable = dims[name]
    return Value(
        name,
        ValueKind.TENSOR,
        shape=form.shape,
        dtype=form.dtype,
        batch_dim=batch_dim,
        splittable=splittable,
        requires_grad=form.requires_grad,
        storage=storage,
    )


def _shapes(runs: Iterable[ObservedRun]) -> dict[str, tuple[int, ...]]:
    """Those of all tensors; of one that several modes make, as the first does."""
    found: dict[str, tuple[int, ...]] = {}
    for run in runs:
        for name, form, _ in run.tensors:
            found.setdefault(name, form.shape)
    return found


def _batch_dims(
    runs: Sequence[ObservedRun], shapes: Mapping[str, tuple[int, ...]], batch_size: int, other: int
) -> _Dims:
    """Those of all tensors.

    Args:
        runs: at `batch_size` samples.
        shapes: of all tensors at `other` samples.
    """
    found: dict[str, tuple[int | None, bool]] = {}
    for name, shape in _shapes(runs).items():
        dim, splittable = _batch_dim(shape, shapes[name], batch_size, other)
        whole = dim is None or shape[dim] % batch_size == 0
        found[name] = dim, splittable and whole
    return found


def _batch_dim(
    once: tuple[int, ...], more: tuple[int, ...], batch_size: int, other: int
) -> tuple[int | None, bool]:
    """The dimension that goes with the samples, and whether it is the only one that changes."""
    if len(once) != len(more):
        return None, False
    changed = [d for d in range(len(once)) if once[d] != more[d]]
    if not changed:
        return None, True
    if len(changed) == 1 and more[changed[0]] * batch_size == once[changed[0]] * other:
        return changed[0], True
    return None, False


# --- inputs that are written ----------------------------------------------------------------------


def copy_written_inputs(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with these inputs copied first; ops and outputs mean the copies.

    A stage must not write to what it was given: the memory is the caller's or another stage's, and
    other stages would be given what it held before. A copy is a value like any other, which goes
    to later stages, and to the caller, with what was written.
    """
    taken = {source.name for source in graph.inputs}
    taken.update(name for op in graph.ops for name in (op.name, *op.outputs))
    copies: dict[str, str] = {}
    for name in names:
        wishes = (f"{name}_{number}" for number in itertools.count(1))
        copies[name] = next(wish for wish in wishes if wish not in taken)
        taken.add(copies[name])

    first = [Op(copy, MethodCall("clone", (Ref(name),)), copy) for name, copy in copies.items()]
    ops = (reading(op, copies) for op in graph.ops)
    return graph.replace(ops=(*first, *ops), outputs=renamed(graph.outputs, copies), values={})
