"""The memory of each op of a forward, and what autograd saves of it for the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.observe import SeenOp, SeenValue, observed


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


def runs_of(graph: Graph) -> Mapping[str, OpRun]:
    """Every op that runs in the graph's own mode, by name: training where there is a loss.

    Raises:
        ModelError: naming the op that cannot run.
    """
    run = observed(graph)

    def size(value: SeenValue) -> int:
        storage = value.storage
        return 0 if storage is None or storage.own else storage.bytes

    def told(op: Op, seen: SeenOp) -> OpRun:
        saved = {item.storage for item in seen.saved}
        values = (name for name in (*op.inputs, *op.outputs) if name in run.values)
        return OpRun(
            frozenset(name for name in values if run.values[name].storage in saved),
            tuple(size(run.values[value]) for value in op.outputs),
            seen.peak,
            seen.kept,
        )

    return {op.name: told(op, run.ops[op.name]) for op in graph.ops if op.name in run.ops}
