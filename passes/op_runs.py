"""What each op of a forward takes of memory, and what autograd keeps of it for the backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.blocks import Blocks, IrregularError
from gpipe_compiler.passes.dry_run import DryRun, saved_storages, storage_key, tensors_in
from gpipe_compiler.passes.watch import DispatchWatch


@dataclass(frozen=True, slots=True)
class OpRun:
    """An op as it ran on fake tensors, which have no workspaces.

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
    blocks = Blocks.of(graph)
    if blocks is not None:
        with contextlib.suppress(IrregularError):
            known = _runs_of(blocks.short)
            return {
                op.name: replace(
                    known[told], saved=frozenset(map(meaning.value, known[told].saved))
                )
                for op, told, meaning in blocks.known()
                if told in known
            }
    return _runs_of(graph)


def _runs_of(graph: Graph) -> dict[str, OpRun]:
    run = DryRun.of(graph, training=graph.loss is not None)
    watch = _Held(run.states.values())
    taken: dict[str, tuple[int, int, frozenset[int]]] = {}
    alive: list[torch.UntypedStorage] = []  # for their keys to stay their own

    def observer(op: Op, execute: Callable[[], Any]) -> Any:
        before = watch.begin()
        with watch, saved_storages(alive) as saved:
            returned = execute()
        made = {storage_key(tensor) for tensor in tensors_in(returned)} & watch.made
        kept = watch.now - before - sum(watch.sizes[key] for key in made)
        taken[op.name] = watch.most - before, kept, frozenset(saved)
        return returned

    environment = run.run(graph.batch_size, observer)
    memory = {n: storage_key(v) for n, v in environment.items() if isinstance(v, torch.Tensor)}
    return {
        op.name: OpRun(
            frozenset(v for v in (*op.inputs, *op.outputs) if memory.get(v) in saved),
            tuple(watch.sizes.get(memory.get(value, 0), 0) for value in op.outputs),
            peak,
            kept,
        )
        for op in graph.ops
        if op.name in taken
        for peak, kept, saved in (taken[op.name],)
    }


class _Held(DispatchWatch):
    """The bytes of the storages that aten ops make, save the model's state and casts of it.

    Attributes:
        now: bytes that are held.
        most: of these, at most since an op began.
        made: the storages that came since then.
        sizes: bytes of all that are held.
    """

    def __init__(self, states: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.made: set[int] = set()
        self.sizes: dict[int, int] = {}
        self._own = {storage_key(tensor) for tensor in states}
        self._casts: list[torch.Tensor] = []  # kept alive, for their keys to stay their own

    def begin(self) -> int:
        """An op begins; what is held before it."""
        self.made.clear()
        self.most = self.now
        return self.now

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Takes note of what an op made."""
        cast = func is torch.ops.aten._to_copy.default and storage_key(args[0]) in self._own
        for tensor in tensors_in(returned):
            key = storage_key(tensor)
            if cast:
                self._own.add(key)
                self._casts.append(tensor)
            elif key not in self._own and key not in self.sizes:
                self._add(key, tensor.untyped_storage())

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = self.sizes[key] = storage.nbytes()
        self.made.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            del self.sizes[key]
            self.made.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)
