"""What autograd keeps of each op's forward for its backward.

It is seen, not guessed: hooks take every tensor that real autograd saves in one forward on fake
tensors (a block that repeats is asked once, `repeats`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Graph, ModuleCall, Op
from gpipe_compiler.passes.blocks import BlockNames, Blocks, IrregularError, Meaning
from gpipe_compiler.passes.dry_run import DryRun, storage_key, tensors_in
from gpipe_compiler.passes.watch import DispatchWatch

_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd keeps of an op.

    Attributes:
        op: the op whose backward asks for it.
        storage: the number of the storage that it looks into; that may be larger, and kept by other
            ops too.
        module: path of the module whose forward makes the call.
        source: the user's line, where it is known.
    """

    op: str
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """The storages that autograd keeps, at the graph's batch size.

    Counted whole: a saved view keeps all of the storage that it looks into. The model's own
    parameters, buffers and constants are not counted, as they are there anyway, nor are the copies
    that autocast casts of them, as all micro-batches share those. Not seen: what a
    kernel allocates while it runs, and what a custom autograd function hides in its `ctx` without
    `save_for_backward`.

    Attributes:
        by_op: op -> numbers of the storages that it saves; ops that save nothing are left out.
            Ops that save the same storage (the result of one, the input of the next) share its
            number.
        bytes: storage number -> bytes.
        by_value: value -> numbers of the storages that its tensors look into, saved or not; values
            without any (numbers, views of the model's state) are left out.
        early: the ops that save all they save before their kernel runs, as products of matrices and
            convolutions do. Made again for what it saves (and that need not be), such an op need
            not run.
        tensors: all that is kept, tensor by tensor, in the order of the ops; what an op saves twice
            alike is told once.
    """

    by_op: Mapping[str, frozenset[int]] = field(default_factory=dict)
    bytes: Mapping[int, int] = field(default_factory=dict)
    by_value: Mapping[str, frozenset[int]] = field(default_factory=dict)
    early: frozenset[str] = frozenset()
    tensors: tuple[SavedTensor, ...] = ()

    def saved_bytes(self, ops: Iterable[str]) -> int:
        """Bytes that a stage of these ops keeps for one micro-batch; a shared storage once."""
        kept = _NOTHING.union(*(self.by_op.get(name, _NOTHING) for name in ops))
        return sum(self.bytes[number] for number in kept)


def saved_tensors(graph: Graph) -> SavedTensors:
    """What autograd keeps in one training forward; an empty table for inference.

    Raises:
        ModelError: naming the op that cannot run.
    """
    if graph.loss is None:
        return SavedTensors()
    return graph.once("saved tensors", lambda: _all_saved(graph))


def _all_saved(graph: Graph) -> SavedTensors:
    blocks = Blocks.of(graph)
    if blocks is not None:
        with contextlib.suppress(IrregularError):
            return _by_blocks(blocks, _saved_tensors(blocks.short))
    return _saved_tensors(graph)


def _by_blocks(blocks: Blocks, known: SavedTensors) -> SavedTensors:
    """What a graph saves, from what its short form does.

    Storages are numbered in the order in which they are first saved. So the third of those that
    one block saves first is to it what the third of another's is to that one.
    """
    homes: dict[int, tuple[BlockNames | None, int, int]] = {}
    counts: dict[tuple[BlockNames | None, int], int] = {}

    def settle(found: frozenset[int], names: BlockNames | None, block: int) -> None:
        for number in sorted(found):
            if number not in homes:
                place = counts[names, block] = counts.get((names, block), -1) + 1
                homes[number] = names, block, place

    for source in blocks.short.inputs:
        settle(known.by_value.get(source.name, _NOTHING), None, 0)
    for op in blocks.short.ops:
        made = (known.by_value.get(value, _NOTHING) for value in op.outputs)
        found = known.by_op.get(op.name, _NOTHING).union(*made)
        settle(found, *blocks.place_of_op.get(op.name, (None, 0)))
    for names in blocks.names:
        inner = (1, 2, names.stretch.count - 2)
        if len({counts.get((names, block), -1) for block in inner}) > 1:
            raise IrregularError("blocks save differently")
    numbers: dict[tuple[BlockNames | None, int, int], int] = {}
    by_op: dict[str, frozenset[int]] = {}
    by_value: dict[str, frozenset[int]] = {}
    sizes: dict[int, int] = {}

    def told_as(found: frozenset[int], meaning: Meaning) -> frozenset[int]:
        mine = []
        for number in sorted(found):
            names, block, place = homes[number]
            key = (names, block if names is None else meaning.block(names, block), place)
            mine.append(numbers.setdefault(key, len(numbers)))
            sizes[mine[-1]] = known.bytes[number]
        return frozenset(mine)

    for source in blocks.graph.inputs:
        if source.name in known.by_value:
            by_value[source.name] = told_as(known.by_value[source.name], blocks.outside)
    for op, told, meaning in blocks.known():
        if told in known.by_op:
            by_op[op.name] = told_as(known.by_op[told], meaning)
        for value, other in zip(op.outputs, blocks.short.op_of[told].outputs, strict=True):
            if other in known.by_value:
                by_value[value] = told_as(known.by_value[other], meaning)
    early = frozenset(op.name for op, told, _ in blocks.known() if told in known.early)
    tensors = []
    of_op: dict[str, list[SavedTensor]] = {}
    for tensor in known.tensors:
        of_op.setdefault(tensor.op, []).append(tensor)
    for op, told, meaning in blocks.known():
        for tensor in of_op.get(told, ()):
            (storage,) = told_as(frozenset((tensor.storage,)), meaning)
            tensors.append(_saved(op, storage, tensor.shape, tensor.dtype))
    return SavedTensors(by_op, sizes, by_value, early, tuple(tensors))


def _saved(op: Op, storage: int, shape: tuple[int, ...], dtype: torch.dtype) -> SavedTensor:
    module = op.call.module if isinstance(op.call, ModuleCall) else op.module
    return SavedTensor(op.name, storage, shape, dtype, module, op.source)


def _saved_tensors(graph: Graph) -> SavedTensors:
    run = DryRun.of(graph, training=True)
    own = _OwnStorages(run.states.values())
    # Every storage is kept to the end, for its key to stay its own. It holds no memory.
    storages: dict[int, torch.UntypedStorage] = {}
    saved: dict[int, None] = {}

    def note(tensor: torch.Tensor) -> frozenset[int]:
        key = storage_key(tensor)
        if key in own.keys:
            return _NOTHING
        storages[key] = tensor.untyped_storage()
        return frozenset((key,))

    forms: dict[tuple[int, tuple[int, ...], torch.dtype], None] = {}

    def pack(tensor: torch.Tensor) -> None:
        keys = note(tensor)
        saved.update(dict.fromkeys(keys))
        forms.update(dict.fromkeys((key, tuple(tensor.shape), tensor.dtype) for key in keys))
        own.kernels_before = own.kernels

    by_op: dict[str, tuple[int, ...]] = {}
    early: set[str] = set()
    tensors: list[SavedTensor] = []

    def observer(op: Op, execute: Callable[[], Any]) -> Any:
        saved.clear()
        forms.clear()
        own.kernels = own.kernels_before = 0
        with own, torch.autograd.graph.saved_tensors_hooks(pack, _never_unpacked):
            returned = execute()
        if saved:
            by_op[op.name] = tuple(saved)
            tensors.extend(_saved(op, *form) for form in forms)
            if not own.kernels_before:
                early.add(op.name)
        return returned

    # The environment keeps the values alive until the keys are replaced by numbers.
    environment = run.run(graph.batch_size, observer)
    by_value = {
        name: _NOTHING.union(*map(note, tensors_in(value))) for name, value in environment.items()
    }
    # As the storages of a whole graph are numbered after its short one (`_by_blocks`).
    number: dict[int, int] = {}
    seen = {key: place for place, key in enumerate(storages)}
    for source in graph.inputs:
        _number_in_turn(number, by_value[source.name])
    for op in graph.ops:
        _number_in_turn(number, by_op.get(op.name, ()))
        for name in op.outputs:
            _number_in_turn(number, sorted(by_value.get(name, _NOTHING), key=seen.__getitem__))
    table = SavedTensors(
        {name: frozenset(number[key] for key in keys) for name, keys in by_op.items()},
        {number[key]: storage.nbytes() for key, storage in storages.items()},
        {name: frozenset(number[key] for key in keys) for name, keys in by_value.items() if keys},
        frozenset(early),
        tuple(replace(tensor, storage=number[tensor.storage]) for tensor in tensors),
    )
    del environment
    return table


def _number_in_turn(number: dict[int, int], keys: Iterable[int]) -> None:
    for key in keys:
        number.setdefault(key, len(number))


class _OwnStorages(DispatchWatch):
    """The storages of the model's state, and of what is cast of them to another type.

    Attributes:
        kernels: that an op has run so far; views and casts are none.
        kernels_before: of these, those before the latest tensor was saved.
    """

    def __init__(self, states: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.keys = {storage_key(tensor) for tensor in states}
        self.kernels = self.kernels_before = 0
        self._casts: list[torch.Tensor] = []  # kept alive, for their keys to stay their own

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Takes note of a cast."""
        if func is not torch.ops.aten._to_copy.default:
            self.kernels += not func.is_view
        elif storage_key(args[0]) in self.keys:
            assert isinstance(returned, torch.Tensor)
            self.keys.add(storage_key(returned))
            self._casts.append(returned)


def _never_unpacked(packed: None) -> torch.Tensor:
    raise AssertionError("the dry run has no backward")
