"""What a model draws in one mode, as its package draws it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.random_ops import (
    first_numbers,
    numbers_of,
    random_ops,
    shared_draws,
)
from gpipe_compiler.runtime.core.random import SeededRandom, seed_in_eval


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of a model in one mode, as its package draws them in its first call.

    Attributes:
        numbers: of its random ops, in their order.
        shared: those that draw once for all micro-batches.
        ops: the op of the graph that each of `numbers` belongs to.
    """

    seed: int
    numbers: tuple[int, ...]
    shared: frozenset[int]
    ops: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph, seed: int, *, training: bool) -> Draws:
        """Those of a graph, in a package with this seed."""
        known = shared_draws(graph, training=training and graph.loss is not None)
        counts = {name: len(shared) for name, shared in known.items()}
        first = first_numbers(graph, counts if training else random_ops(graph))
        numbers = numbers_of(graph.ops, first, counts)
        drawing = [op.name for op in graph.ops if op.name in known]
        shared = [shared for name in drawing for shared in known[name]]
        return cls(
            seed if training else seed_in_eval(seed, 0),
            numbers,
            frozenset(number for number, alike in zip(numbers, shared, strict=True) if alike),
            tuple(name for name in drawing for _ in known[name]),
        )

    def seeded(self, microbatch: int) -> contextlib.AbstractContextManager[object]:
        """Around one call of the model, on one micro-batch; nothing where it draws nothing."""
        if not self.numbers:  # torch compiles nothing, flex attention neither, inside of a mode
            return contextlib.nullcontext()
        return SeededRandom(self.seed, 0, microbatch, self.numbers, self.shared)
