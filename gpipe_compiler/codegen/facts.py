"""The results of the analyses of a graph, gathered once for all its stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Argument, Graph, Op
from gpipe_compiler.ir.arguments import BatchMultiple
from gpipe_compiler.ir.blocks import ShapeReads
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.random_ops import first_numbers, numbers_of, shared_draws
from gpipe_compiler.passes.saved_tensors import OpRun, runs_of
from gpipe_compiler.passes.written_once import written_once
from gpipe_compiler.runtime.sizes import Dim, Expression


@dataclass(frozen=True, slots=True)
class Randoms:
    """The random aten ops of a stage.

    Attributes:
        numbers: theirs in the whole model.
        shared: the numbers of those that draw once for all micro-batches.
    """

    numbers: tuple[int, ...]
    shared: tuple[int, ...]


@dataclass(frozen=True)
class CodeFacts:
    """A graph and what code generation asks about it.

    Attributes:
        templates: what non-tensor values are, where that follows from shapes alone.
        randoms: the random aten ops that each op runs, in training where there is a loss: whether
            what they draw has no batch dimension.
        randoms_in_eval: those that run in eval mode.
        mixing: the ops in which samples meet.
        once: the states that are written without looking at samples.
        runs: what each op takes of memory.
    """

    graph: Graph
    effects: Effects
    templates: Mapping[str, Argument]
    randoms: Mapping[str, tuple[bool, ...]]
    randoms_in_eval: Mapping[str, tuple[bool, ...]]
    mixing: frozenset[str]
    once: frozenset[str]
    runs: Mapping[str, OpRun]

    @classmethod
    def of(cls, graph: Graph) -> CodeFacts:
        return cls(
            graph,
            effects(graph),
            shape_values(graph),
            shared_draws(graph),
            shared_draws(graph, training=False),
            mixing_ops(graph),
            written_once(graph),
            runs_of(graph),
        )

    @property
    def shapes(self) -> ShapeReads:
        """What calls read off shapes."""
        return ShapeReads(self.graph, self.templates)

    @cached_property
    def multiples(self) -> Mapping[str, Dim]:
        """How many times the samples sizes are that grow with them; what other free ones are."""
        found: dict[str, Dim] = {}
        for value, item in self.templates.items():
            if isinstance(item, BatchMultiple):
                found[value] = item.factor
            elif isinstance(item, Expression):
                found[value] = item
        return found

    @cached_property
    def _first_random(self) -> Mapping[str, int]:
        """The number of each op's first random aten op in the whole model."""
        return first_numbers(self.graph, _counts(self.randoms))

    def random_ops(self, ops: Iterable[Op], *, training: bool) -> Randoms:
        known = self.randoms if training else self.randoms_in_eval
        run = [op for op in ops if op.name in known]
        numbers = numbers_of(run, self._first_random, _counts(known))
        shared = itertools.chain.from_iterable(known[op.name] for op in run)
        return Randoms(numbers, tuple(itertools.compress(numbers, shared)))

    def writes(self, op: str) -> bool:
        """Whether an op writes into memory that others see."""
        return op in self.effects.writes or op in self.effects.state_writes


def _counts(randoms: Mapping[str, tuple[bool, ...]]) -> Mapping[str, int]:
    return {name: len(shared) for name, shared in randoms.items()}
