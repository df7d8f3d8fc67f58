"""What a model draws in eval mode, such as a dropout that is always on, or noise."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.random_ops import (
    first_numbers,
    numbers_of,
    random_in_eval,
    random_ops,
)
from gpipe_compiler.runtime.random import SeededRandom, seed_in_eval


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of a model in eval mode, as its package draws them in its first call.

    Attributes:
        numbers: of its random ops, in their order.
        where: the first of them, and the user's line.
    """

    seed: int
    numbers: tuple[int, ...]
    where: str

    @classmethod
    def of(cls, graph: Graph, seed: int) -> Draws:
        """Those of a graph, in a package with this seed."""
        counts = random_in_eval(graph)
        numbers = numbers_of(graph.ops, first_numbers(graph, random_ops(graph)), counts)
        first = next((op for op in graph.ops if op.name in counts), None)
        where = "" if first is None else f"{first.name} ({first.source or 'no line is known'})"
        return cls(seed_in_eval(seed, 0), numbers, where)

    @property
    def any(self) -> bool:
        """Whether it draws at all."""
        return bool(self.numbers)

    @property
    def note(self) -> str:
        """What a reader should know of it."""
        return (
            f"the model draws random numbers in eval mode too, first in {self.where}: the package "
            "is held against its outputs for the micro-batches, each with the same numbers, and "
            "whether the loss of a batch is that of its micro-batches is judged by its ops alone"
        )

    def seeded(self, microbatch: int) -> contextlib.AbstractContextManager[object]:
        """Around one call."""
        if not self.numbers:
            return contextlib.nullcontext()
        return SeededRandom(self.seed, 0, microbatch, self.numbers)
