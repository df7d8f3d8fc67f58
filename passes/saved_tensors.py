"""The tensors that autograd saves of each op for its backward, and the memory of each forward.

They are observed, not estimated: real autograd saves them in one forward on fakes (`observe`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.graph import found_once
from gpipe_compiler.passes.observe import SeenOp, SeenValue, Storage, observed

_NOTHING: frozenset[int] = frozenset()


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
    """

    by_op: Mapping[str, frozenset[int]] = field(default_factory=dict)
    bytes: Mapping[int, int] = field(default_factory=dict)
    by_value: Mapping[str, frozenset[int]] = field(default_factory=dict)
    early: frozenset[str] = frozenset()

    def saved_bytes(self, ops: Iterable[str]) -> int:
        """Bytes that a stage of these ops keeps for one micro-batch; a shared storage once."""
        kept = _NOTHING.union(*(self.by_op.get(name, _NOTHING) for name in ops))
        return sum(self.bytes[number] for number in kept)


@found_once
def saved_tensors(graph: Graph) -> SavedTensors:
    """What autograd keeps in one training forward; an empty table for inference."""
    if graph.loss is None:
        return SavedTensors()
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
    for source in graph.inputs:
        looked_into(source.name)
    for op in graph.ops:
        seen = run.ops.get(op.name)
        saved = () if seen is None else [storage for storage in seen.saved if not storage.own]
        if saved:
            by_op[op.name] = frozenset(map(number, saved))
        for value in op.outputs:
            looked_into(value)
    return SavedTensors(
        by_op,
        {number: storage.bytes for storage, number in numbers.items()},
        by_value,
        frozenset(name for name in by_op if run.ops[name].early),
    )


# --- op by op -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpRun:
    """The memory of an op.

    Attributes:
        saved: those of the values that it reads and makes whose memory autograd keeps for it. What
            a custom autograd function hides in its `ctx` without `save_for_backward` is not seen.
        sizes: bytes of the storages of its outputs; 0 for what is no tensor, or the model's own.
        peak: bytes above those before it, at most, with what it makes.
        kept: bytes that stay after it in no value.
    """

    saved: frozenset[str]
    sizes: tuple[int, ...]
    peak: int
    kept: int


@found_once
def runs_of(graph: Graph) -> Mapping[str, OpRun]:
    """Every op that runs in the graph's own mode, by name: training where there is a loss."""
    run = observed(graph)

    def size(value: SeenValue) -> int:
        storage = value.storage
        return 0 if storage is None or storage.own else storage.bytes

    def op_run(op: Op, seen: SeenOp) -> OpRun:
        saved = set(seen.saved)
        values = (name for name in (*op.inputs, *op.outputs) if name in run.values)
        return OpRun(
            frozenset(name for name in values if run.values[name].storage in saved),
            tuple(size(run.values[value]) for value in op.outputs),
            seen.peak,
            seen.kept,
        )

    return {op.name: op_run(op, run.ops[op.name]) for op in graph.ops if op.name in run.ops}
