"""The tensors that autograd saves of each op for its backward.

They are observed, not estimated: real autograd saves them in one forward on fakes (`observe`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Graph, ModuleCall
from gpipe_compiler.passes.observe import Storage, observed

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
    return graph.once("saved tensors", lambda: _saved_tensors(graph))


def _saved_tensors(graph: Graph) -> SavedTensors:
    run = observed(graph)
    numbers: dict[Storage, int] = {}

    def number(storage: Storage) -> int:
        return numbers.setdefault(storage, len(numbers))

    def looked_into(value: str) -> None:
        found = () if value not in run.values else run.values[value].storages
        own = frozenset(number(storage) for storage in found if not storage.own)
        if own:
            by_value[value] = own

    by_op: dict[str, frozenset[int]] = {}
    by_value: dict[str, frozenset[int]] = {}
    tensors: list[SavedTensor] = []
    for source in graph.inputs:
        looked_into(source.name)
    for op in graph.ops:
        seen = run.ops.get(op.name)
        saved = () if seen is None else [item for item in seen.saved if not item.storage.own]
        if saved:
            by_op[op.name] = frozenset(number(item.storage) for item in saved)
            module = op.call.module if isinstance(op.call, ModuleCall) else op.module
            tensors.extend(
                SavedTensor(op.name, number(storage), shape, dtype, module, op.source)
                for storage, shape, dtype in saved
            )
        for value in op.outputs:
            looked_into(value)
    return SavedTensors(
        by_op,
        {number: storage.bytes for storage, number in numbers.items()},
        by_value,
        frozenset(name for name in by_op if run.ops[name].early),
        tuple(tensors),
    )
