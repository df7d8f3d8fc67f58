"""Runs a graph once on fake tensors and records all that the analyses ask about it.

What an op reads and makes, writes in place, keeps for its backward, draws and allocates is seen in
one forward, not guessed. A run of a number of samples that the graph cannot run on raises a
ModelError that names the op. Of a block that repeats four calls are run (`ir.repeats`), and
what is observed of them is carried over to all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from gpipe_compiler.ir import Graph, Op, Ref
from gpipe_compiler.ir.arguments import choices, has_gradient, storage_key, tensors_in
from gpipe_compiler.ir.repeats import IrregularError, Meaning, Name, NameKind, ShortenedGraph
from gpipe_compiler.passes.dry_run import DryRun, modes
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.op_watch import KernelRun, OpNotes, OpWatch


class Storage(NamedTuple):
    """A memory that tensors look into.

    Attributes:
        name: of the model's tensor that it belongs to, of the first value in it, or of the op that
            autograd first keeps it for.
        place: which of several with this name.
        own: whether it is of the model's state, or of a copy that autocast casts of that.
    """

    name: Name
    place: int
    bytes: int
    own: bool


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its numbers, at the end of a run.

    Attributes:
        offset: into its storage, in elements.
        viewed: whether autograd knows it as a view.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    viewed: bool


@dataclass(frozen=True, slots=True)
class SeenValue:
    """A value of a run.

    Attributes:
        seen: the form of a tensor; of a nest of tensors what lies in it, with their forms in place
            of them; any other value as it is.
        storages: of the tensors, in order.
        nest: how a nest is put together.
    """

    seen: Any
    storages: tuple[Storage, ...]
    nest: TreeSpec | None = None

    @property
    def form(self) -> Form | None:
        """None for what is no tensor."""
        return self.seen if isinstance(self.seen, Form) else None

    @property
    def plain(self) -> object:
        """What is no tensor, and has none inside."""
        return None if self.storages else self.seen

    @property
    def storage(self) -> Storage | None:
        return self.storages[0] if self.form is not None else None


@dataclass(frozen=True, slots=True)
class SeenOp:
    """An op as it ran on fake tensors, which have no workspaces.

    Attributes:
        written: storages, there before the op, that it writes.
        saved: storages that autograd keeps for its backward. What a custom autograd function hides
            in its `ctx` without `save_for_backward` is not seen.
        early: whether all that it saves is saved before its kernel runs.
        lost: whether any of it is written to later, so that its backward raises.
        peak: bytes above those before it, at most, with what it makes; the model's state and casts
            of it are not counted.
        kept: bytes that stay after it in no value.
        drawn: shapes of what its random kernels draw, in order.
    """

    written: frozenset[Storage]
    saved: tuple[Storage, ...]
    early: bool
    lost: bool
    peak: int
    kept: int
    kernels: tuple[KernelRun, ...]
    drawn: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ObservedRun:
    """A run of a graph in one mode.

    Attributes:
        values: by name, inputs first; those that are made in the other mode only are left out.
        ops: by name, those that run in this mode.
        by_blocks: whether it was seen on the short graph alone.
        guessed: whether the number of elements of a result depended on values.
    """

    values: Mapping[str, SeenValue]
    ops: Mapping[str, SeenOp]
    by_blocks: bool = False
    guessed: bool = False

    @property
    def tensors(self) -> Iterator[tuple[str, Form, Storage]]:
        for name, value in self.values.items():
            if value.form is not None:
                yield name, value.form, value.storages[0]

    @cached_property
    def sharing(self) -> Mapping[Storage, frozenset[str]]:
        """The values that are tensors, by their storage."""
        return _by_storage((storage, name) for name, _, storage in self.tensors)

    @cached_property
    def savers(self) -> Mapping[Storage, frozenset[str]]:
        """The ops that autograd keeps each storage for."""
        return _by_storage((item, name) for name, op in self.ops.items() for item in op.saved)


def _by_storage(pairs: Iterable[tuple[Storage, str]]) -> Mapping[Storage, frozenset[str]]:
    found: dict[Storage, set[str]] = {}
    for storage, name in pairs:
        found.setdefault(storage, set()).add(name)
    return {storage: frozenset(names) for storage, names in found.items()}


def observed(
    graph: Graph, samples: int | None = None, *, training: bool | None = None
) -> ObservedRun:
    """The observed run of the graph at a batch size, kept with the graph.

    Args:
        samples: by default the graph's batch size.
        training: by default in its own mode: whether it has a loss.

    Raises:
        ModelError: naming the op that cannot run.
    """
    size = graph.batch_size if samples is None else samples
    mode = graph.loss is not None if training is None else training
    return graph.once(("observed", size, mode), lambda: _observed(graph, size, training=mode))


def in_all_modes(graph: Graph, samples: int | None = None) -> list[ObservedRun]:
    """The runs in which every op is seen: in the graph's own mode first."""
    return [observed(graph, samples, training=training) for training in modes(graph)]


def in_the_other_mode(graph: Graph) -> Mapping[str, SeenValue]:
    """The values in the mode that is not the graph's own; none where no op takes one tensor in
    train and another in eval mode, so that shapes are the same in both."""
    made = (choice for op in graph.ops for choice in choices(op.arguments))
    if any(isinstance(side, Ref) for c in made for side in (c.train, c.evaluation)):
        return observed(graph, training=graph.loss is None).values
    return {}


def _observed(graph: Graph, samples: int, *, training: bool) -> ObservedRun:
    blocks = ShortenedGraph.of(graph)
    if blocks is not None:
        with contextlib.suppress(IrregularError):
            return _of_all_blocks(blocks, _seen(blocks.short, samples, training=training))
    return _seen(graph, samples, training=training)


# --- one run ---------------------------------------------------------------------------------


def _seen(graph: Graph, samples: int, *, training: bool) -> ObservedRun:
    fakes = HostFakes()
    run = DryRun.of(graph, training=training, mode=fakes)
    watch = OpWatch(run.states.values())
    notes: dict[str, OpNotes] = {}

    def observer(op: Op, execute: Callable[[], Any]) -> Any:
        notes[op.name] = watch.begin(op.name)
        hooks = torch.autograd.graph.saved_tensors_hooks(watch.pack, _unpacked)
        with fakes.watched(watch.saw), hooks:
            returned = execute()
        watch.end(returned)
        return returned

    environment = run.run(samples, observer)
    names = _Storages(graph, run, environment, watch)
    values = {
        name: _value(environment[name], names.of) for name in names.values if name in environment
    }
    made = {source.name for source in graph.inputs}
    before = {storage for name in made for storage in values[name].storages}
    before.update(names.states)
    lost = watch.overwritten()
    ops: dict[str, SeenOp] = {}
    for op in graph.ops:
        found = notes.get(op.name)
        if found is None:
            continue
        ops[op.name] = SeenOp(
            frozenset(s for s in map(names.get, found.written) if s in before),
            tuple(map(names.of, found.saved)),
            bool(found.saved) and not found.kernels_before,
            op.name in lost,
            found.most,
            found.kept,
            tuple(found.kernels),
            tuple(found.drawn),
        )
        before.update(s for name in op.outputs if name in values for s in values[name].storages)
    return ObservedRun(values, ops, guessed=fakes.guesses > 0)


def _value(value: Any, storage: Callable[[int], Storage]) -> SeenValue:
    if isinstance(value, torch.Tensor):
        return SeenValue(_form(value), (storage(storage_key(value)),))
    inside = tensors_in(value)
    if not inside:
        return SeenValue(value, ())
    leaves, nest = tree_flatten(value)
    forms = [_form(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return SeenValue(forms, tuple(storage(storage_key(tensor)) for tensor in inside), nest)


def _form(tensor: torch.Tensor) -> Form:
    return Form(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        has_gradient(tensor),
        tensor._is_view(),
    )


class _Storages:
    """Names the storages of a run, all of which are alive.

    Attributes:
        values: names of all values, in the order of the graph.
        states: the storages of the model's own tensors.
    """

    def __init__(
        self, graph: Graph, run: DryRun, environment: Mapping[str, Any], watch: OpWatch
    ) -> None:
        self._found: dict[int, Storage] = {}
        self._watch = watch
        for name, tensor in run.states.items():
            self._add(Name(NameKind.STATE, name), [tensor.untyped_storage()])
        self.states = set(self._found.values())
        self.values = [source.name for source in graph.inputs]
        self.values.extend(name for op in graph.ops for name in op.outputs)
        for name in self.values:
            tensors = tensors_in(environment.get(name))
            self._add(Name(NameKind.VALUE, name), [tensor.untyped_storage() for tensor in tensors])
        for op, storages in watch.alive.items():
            self._add(Name(NameKind.OP, op), storages)

    def of(self, key: int) -> Storage:
        return self._found[key]

    def get(self, key: int) -> Storage | None:
        return self._found.get(key)

    def _add(self, name: Name, storages: Iterable[torch.UntypedStorage]) -> None:
        place = 0
        for storage in storages:
            key = int(storage._cdata)
            if key not in self._found:
                own = key in self._watch.own
                self._found[key] = Storage(name, place, storage.nbytes(), own)
                place += 1


def _unpacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# --- from the short graph to the whole --------------------------------------------------------


def _of_all_blocks(blocks: ShortenedGraph, known: ObservedRun) -> ObservedRun:
    """The run of the whole graph, from that of its short form.

    Raises:
        IrregularError: where the blocks in the middle are not alike.
    """
    _hold_alike(blocks, known)
    values = {source.name: known.values[source.name] for source in blocks.graph.inputs}
    values = {name: _value_as(value, blocks.outside) for name, value in values.items()}
    ops: dict[str, SeenOp] = {}
    for op, known_as, meaning in blocks.known():
        if known_as in known.ops:
            ops[op.name] = _op_as(known.ops[known_as], meaning)
        for name, old in zip(op.outputs, blocks.short.op_of[known_as].outputs, strict=True):
            if old in known.values:
                values[name] = _value_as(known.values[old], meaning)
    return ObservedRun(values, ops, by_blocks=True, guessed=known.guessed)


def _hold_alike(blocks: ShortenedGraph, known: ObservedRun) -> None:
    """Holds the second block against the third.

    What the third is given is then like what the second is, and so it goes on: fake tensors of
    equal forms that share memory in the same way.
    """
    for names in blocks.names:
        further = blocks.further(names)
        for one, other in zip(names.ops(1), names.ops(names.short.all_kept[2]), strict=True):
            ops = known.ops.get(one.name), known.ops.get(other.name)
            if ops[0] is not None and _op_as(ops[0], further) != ops[1]:
                raise IrregularError(one.name)
            for a, b in zip(one.outputs, other.outputs, strict=True):
                if a in known.values and not _is_alike(
                    _value_as(known.values[a], further), known.values[b]
                ):
                    raise IrregularError(a)


def _is_alike(one: SeenValue, other: SeenValue) -> bool:
    return (
        one.storages == other.storages
        and type(one.seen) is type(other.seen)
        and repr(one.seen) == repr(other.seen)
    )


def _storage_as(storage: Storage, meaning: Meaning) -> Storage:
    name, place, size, own = storage
    return Storage(meaning.of(name), place, size, own)


def _value_as(value: SeenValue, meaning: Meaning) -> SeenValue:
    storages = tuple(_storage_as(storage, meaning) for storage in value.storages)
    return SeenValue(value.seen, storages, value.nest)


def _op_as(op: SeenOp, meaning: Meaning) -> SeenOp:
    if not op.written and not op.saved:
        return op
    return replace(
        op,
        written=frozenset(_storage_as(s, meaning) for s in op.written),
        saved=tuple(_storage_as(s, meaning) for s in op.saved),
    )
