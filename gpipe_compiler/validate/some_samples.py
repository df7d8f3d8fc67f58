"""The values of a graph for some samples beside those for more of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.frontend.comparable_runs import EvenDraws
from gpipe_compiler.ir import Graph, Input, Op
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare
from gpipe_compiler.runtime.train.data import resized
from gpipe_compiler.validate.float_types import double

SAMPLES, PARTS = 6, ((4, 0), (1, 2, 3, 5))
"""Samples with which the op at fault is looked for, and those that run apart from the others."""


def mixing_among(
    graph: Graph, count: int, other: Mapping[str, torch.Tensor], ends: Collection[str] | None = None
) -> Op | None:
    """The first op that makes wrong rows for a number of samples.

    Args:
        other: as for `values_of`.
        ends: as for `first_mixing`.
    """
    parts = PARTS if count == SAMPLES else (PARTS[1], range(1, count))
    return first_mixing(values_of_parts(graph, other, count, parts), ends)


def first_mixing(runs: Sequence[BothRuns], ends: Collection[str] | None) -> Op | None:
    """The first op that makes rows which are wrong.

    Args:
        ends: values of which one has to be wrong, unless some samples have no rows anywhere; what
            lies before them may have its rows in another order. None where it is known that
            samples meet.
    """
    wrong = [values for values in runs if ends is None or values.differ_at(ends)]
    return next((op for op in (values.root() for values in wrong) if op is not None), None)


def values_of_parts(
    graph: Graph, other: Mapping[str, torch.Tensor], count: int, parts: Sequence[Sequence[int]]
) -> list[BothRuns]:
    """The values for a number of samples beside those for parts of them; none where the graph does
    not run on them."""
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            whole = values_of(graph, other, range(count), count)
            return [
                BothRuns(graph, whole, values_of(graph, other, part, count), part, count)
                for part in parts
            ]
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return []


@dataclass(frozen=True, eq=False)
class BothRuns:
    """The values of a graph for all samples, and for a part of them.

    Attributes:
        samples: how many there are.
    """

    graph: Graph
    whole: Mapping[str, Any]
    part: Mapping[str, Any]
    chosen: Sequence[int]
    samples: int

    def root(self) -> Op | None:
        """The first op that takes rows which are right and makes some that are not."""
        found = [op for op in self.graph.ops if any(map(self.is_wrong, op.outputs))]
        # What takes no samples numbers them: that is wrong only where they are computed with it.
        takes = (op for op in found if any(map(self._is_right, op.inputs)))
        op = next(takes, found[0] if found else None)
        # What it takes that is no rows, such as a mean, was made where samples met.
        while op is not None:
            met = [name for name in op.inputs if self._has_changed(name)]
            maker = self.graph.producer.get(met[0]) if met else None
            if maker is None:
                return op
            op = maker
        return None

    def differ_at(self, ends: Collection[str]) -> bool:
        """Whether one of these values is wrong, or any has not as many rows as its samples."""
        without_rows = (self._lacks_rows(name) for op in self.graph.ops for name in op.outputs)
        return any(map(self.is_wrong, ends)) or any(without_rows)

    def _lacks_rows(self, name: str) -> bool:
        """Whether a value has rows of some of its samples only, told apart by their numbers."""
        one, known = self.whole.get(name), self.graph.values[name]
        if known.batch_dim is None or not known.splittable or not isinstance(one, torch.Tensor):
            return False
        planned = known.shape[known.batch_dim] * self.samples
        return one.shape[known.batch_dim] * self.graph.batch_size != planned

    def _has_changed(self, name: str) -> bool:
        """Whether a value without a batch dimension is another for some of the samples."""
        one, other, known = self.whole.get(name), self.part.get(name), self.graph.values[name]
        if known.batch_dim is not None or not isinstance(one, torch.Tensor):
            return False
        assert isinstance(other, torch.Tensor)
        return one.shape != other.shape or not _same(one, other)

    def is_wrong(self, name: str) -> bool:
        """Whether a value for some of the samples is not those rows of what it is for all."""
        one, other, known = self.whole.get(name), self.part.get(name), self.graph.values[name]
        if known.batch_dim is None or not isinstance(one, torch.Tensor):
            return False
        assert isinstance(other, torch.Tensor)
        if self._lacks_rows(name):
            return True
        rows, rest = divmod(one.shape[known.batch_dim], self.samples)
        if rest:
            return False  # one row for several samples: the next values show it
        chosen = [sample * rows + row for sample in self.chosen for row in range(rows)]
        return not _same(one.index_select(known.batch_dim, torch.tensor(chosen)), other)

    def _is_right(self, name: str) -> bool:
        """Whether a value has samples, which are the same ones among some as among all."""
        return self.graph.values[name].batch_dim is not None and not self.is_wrong(name)


def on_meta(graph: Graph) -> bool:
    """Whether the model or its example has no numbers."""
    return any(tensor.is_meta for tensor in (*graph.tensors.values(), *graph.example.values()))


def values_of(
    graph: Graph,
    other: Mapping[str, torch.Tensor],
    rows: Sequence[int],
    samples: int,
    *,
    training: bool = False,
) -> Mapping[str, Any]:
    """Every value for some samples of the example.

    Args:
        other: tensors in place of the graph's own; in 64 bits for training.
        rows: the samples.
        samples: of which these are some.
    """

    tensors = {**graph.tensors, **{name: t for name, t in other.items() if name in graph.tensors}}
    states = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    given = inputs_of(graph, rows, samples)
    if training:
        given = {name: double(tensor) for name, tensor in given.items()}
    return Interpreter(graph, states, training=training).run(given)


def inputs_of(graph: Graph, rows: Sequence[int], samples: int) -> dict[str, torch.Tensor]:
    """Some samples of the example, by the names of the inputs."""

    def some(source: Input) -> torch.Tensor:
        dim = source.batch_dim
        tensor = resized(graph.example[source.name], dim, samples)
        return tensor.clone() if dim is None else tensor.index_select(dim, torch.tensor(rows))

    return {source.name: some(source) for source in graph.inputs}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    (row,) = compare({ComparedKind.OUTPUT: {"": other}}, {ComparedKind.OUTPUT: {"": one}})
    return row.passed
