"""What the analyses say of a graph, gathered once for all its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Argument, Graph, Op
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.mixing import mixing_ops
from gpipe_compiler.passes.random_ops import (
    first_numbers,
    numbers_of,
    random_in_eval,
    random_ops,
)
from gpipe_compiler.passes.seen import saved_values


@dataclass(frozen=True)
class Facts:
    """A graph and what code generation asks about it.

    Attributes:
        templates: what non-tensor values are, where that follows from shapes alone.
        randoms: how many random aten ops each op runs, in training where there is a loss.
        randoms_in_eval: how many in eval mode.
        mixing: the ops in which samples meet.
        saved: op -> the values whose memory autograd keeps for its backward.
    """

    graph: Graph
    effects: Effects
    templates: Mapping[str, Argument]
    randoms: Mapping[str, int]
    randoms_in_eval: Mapping[str, int]
    mixing: frozenset[str]
    saved: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, graph: Graph) -> Facts:
        """The facts of an annotated graph."""
        return cls(
            graph,
            effects(graph),
            shape_values(graph),
            random_ops(graph),
            random_in_eval(graph),
            mixing_ops(graph),
            saved_values(graph),
        )

    @cached_property
    def _first_random(self) -> Mapping[str, int]:
        """The number of each op's first random aten op in the whole model."""
        return first_numbers(self.graph, self.randoms)

    def random_numbers(self, ops: Iterable[Op]) -> tuple[int, ...]:
        """The numbers, in the whole model, of the random aten ops that these ops run."""
        return numbers_of(ops, self._first_random, self.randoms)

    def random_numbers_in_eval(self, ops: Iterable[Op]) -> tuple[int, ...]:
        """The same numbers of those that they run in eval mode."""
        return numbers_of(ops, self._first_random, self.randoms_in_eval)

    def writes(self, op: str) -> bool:
        """Whether an op writes into memory that others see."""
        return op in self.effects.writes or op in self.effects.state_writes
