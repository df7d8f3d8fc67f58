"""Which tensors of a run share memory, and which of them autograd keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.dry_run import DryRun, saved_storages, storage_key


@dataclass(frozen=True)
class SeenRun:
    """The tensors of a run in one mode.

    Attributes:
        memory: by value, the key of its storage; `sharing` the other way round.
        states: the keys of the model's own tensors.
        saved: by op, the keys of what autograd keeps; empty where it is off.
        alive: what the keys are of.

    What a custom autograd function hides in its `ctx` without `save_for_backward` is not seen.
    """

    tensors: Mapping[str, torch.Tensor]
    memory: Mapping[str, int]
    sharing: Mapping[int, frozenset[str]]
    states: frozenset[int]
    saved: Mapping[str, frozenset[int]]
    alive: object

    @cached_property
    def savers(self) -> Mapping[int, frozenset[str]]:
        """By key, the ops that autograd keeps its memory for."""
        found: dict[int, set[str]] = {}
        for name, keys in self.saved.items():
            for key in keys:
                found.setdefault(key, set()).add(name)
        return {key: frozenset(names) for key, names in found.items()}

    @classmethod
    def of(cls, graph: Graph, *, training: bool) -> SeenRun:
        """The graph run on fake tensors.

        Raises:
            ModelError: naming the op that cannot run.
        """
        run = DryRun.of(graph, training=training)
        alive: list[torch.UntypedStorage] = []
        saved: dict[str, set[int]] = {}

        def observer(op: Op, execute: Callable[[], Any]) -> Any:
            with saved_storages(alive) as keys:
                returned = execute()
            saved.setdefault(op.name, set()).update(keys)
            return returned

        environment = run.run(graph.batch_size, observer)
        tensors = {n: v for n, v in environment.items() if isinstance(v, torch.Tensor)}
        memory = {name: storage_key(tensor) for name, tensor in tensors.items()}
        sharing: dict[int, set[str]] = {}
        for name, key in memory.items():
            sharing.setdefault(key, set()).add(name)
        return cls(
            tensors,
            memory,
            {key: frozenset(names) for key, names in sharing.items()},
            frozenset(map(storage_key, run.states.values())),
            {name: frozenset(keys) for name, keys in saved.items() if keys},
            (alive, run.states),
        )
