"""The values of a graph for some samples beside those for more of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.comparable_runs import MANY, EvenDraws, are_same, double, may_be_tried
from gpipe_compiler.ir import Graph, Input, Op
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.left_out import with_all_layers
from gpipe_compiler.ir.sizes import SampleRule
from gpipe_compiler.passes.batch_rules import all_rules, counting_in_loss, taken_together
from gpipe_compiler.passes.loss_functions import takes_by_number
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.inputs import even_sizes
from gpipe_compiler.runtime.train.data import resized
from gpipe_compiler.validate.loss_splitting import HINT, Losses, loss_shares

SAMPLES, PARTS = 6, ((4, 0), (1, 2, 3, 5))
"""Samples with which the op at fault is looked for, and those that run apart from the others."""


def mixing_among(
    graph: Graph, count: int, other: Mapping[str, torch.Tensor], ends: Collection[str] | None = None
) -> Op | None:
    """The first op that makes wrong rows for a number of samples.

    Args:
        ends: values of which one has to be wrong, unless some samples have no rows anywhere; what
            lies before them may have its rows in another order. None where it is known that
            samples meet.
    """
    parts = PARTS if count == SAMPLES else (PARTS[1], range(1, count))
    return first_wrong(SomeSamples(graph, other, count), parts, ends)


def first_wrong(
    samples: SomeSamples,
    parts: Sequence[Sequence[int]],
    ends: Collection[str] | None,
    *,
    lacking: bool = True,
) -> Op | None:
    """The first op that makes rows which are wrong.

    Args:
        ends: as in `mixing_among`.
        lacking: whether it is wrong, too, that some samples have no rows.
    """
    if ends is not None:
        held = samples.beside(parts, keep=ends)
        parts = [both.chosen for both in held if both.differ_at(ends, lacking=lacking)]
    if not parts:
        return None
    # All values of a run may take far more memory than the model does: kept where one is wrong.
    return next(
        (op for op in (both.root() for both in samples.beside(parts)) if op is not None), None
    )


@dataclass(frozen=True, eq=False)
class SomeSamples:
    """Runs of a graph on some of the samples of its example."""

    graph: Graph
    other: Mapping[str, torch.Tensor]
    count: int
    training: bool = False

    def beside(
        self, parts: Sequence[Sequence[int]], keep: Collection[str] | None = None
    ) -> list[BothRuns]:
        """The values for all of them beside those for parts; none where the graph does not run."""
        try:
            with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
                whole = self._values(range(self.count), keep)
                return [
                    BothRuns(self.graph, whole, self._values(part, keep), part, self.count)
                    for part in parts
                ]
        except Exception:  # noqa: BLE001  # whatever the user's ops raise
            return []

    def _values(self, rows: Sequence[int], keep: Collection[str] | None) -> Mapping[str, Any]:
        return values_of(
            self.graph, self.other, rows, self.count, training=self.training, keep=keep
        )


@dataclass(frozen=True, eq=False)
class BothRuns:
    """The values of a graph for all samples, and for a part of them."""

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

    def differ_at(self, ends: Collection[str], *, lacking: bool) -> bool:
        """Whether one of these values is wrong.

        Args:
            lacking: or any value has not as many rows as its samples.
        """
        without_rows = (self._lacks_rows(name) for op in self.graph.ops for name in op.outputs)
        return any(map(self.is_wrong, ends)) or (lacking and any(without_rows))

    def _lacks_rows(self, name: str) -> bool:
        """Whether a value has rows of some of its samples only, told apart by their numbers.

        A single row, whatever the number of samples, is of none: in this mode all of them share it.
        """
        one, other, known = self.whole.get(name), self.part.get(name), self.graph.values[name]
        if known.batch_dim is None or not known.splittable or not isinstance(one, torch.Tensor):
            return False
        assert isinstance(other, torch.Tensor)
        rows, planned = one.shape[known.batch_dim], known.shape[known.batch_dim] * self.samples
        shared = rows == other.shape[known.batch_dim] == 1
        return not shared and rows * self.graph.batch_size != planned

    def _has_changed(self, name: str) -> bool:
        """Whether a value without a batch dimension is another for some of the samples."""
        one, other, known = self.whole.get(name), self.part.get(name), self.graph.values[name]
        if known.batch_dim is not None or not isinstance(one, torch.Tensor):
            return False
        assert isinstance(other, torch.Tensor)
        return one.shape != other.shape or not are_same(one, other)

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
        return not are_same(one.index_select(known.batch_dim, torch.tensor(chosen)), other)

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
    keep: Collection[str] | None = None,
) -> Mapping[str, Any]:
    """Every value for some samples of the example.

    Args:
        other: tensors in place of the graph's own; in 64 bits for training.
        samples: of which these are some.
        keep: the values that are wanted; None: all.
    """

    tensors = {**graph.tensors, **{name: t for name, t in other.items() if name in graph.tensors}}
    states = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    given = inputs_of(graph, rows, samples)
    if training:
        given = {name: double(tensor) for name, tensor in given.items()}
    runs = Interpreter(with_all_layers(graph), states, training=training)
    return runs.run(given, keep=keep)


def inputs_of(graph: Graph, rows: Sequence[int], samples: int) -> dict[str, torch.Tensor]:
    def some(source: Input) -> torch.Tensor:
        dim = source.batch_dim
        tensor = resized(graph.example[source.name], dim, samples)
        return tensor.clone() if dim is None else tensor.index_select(dim, torch.tensor(rows))

    return {source.name: some(source) for source in graph.inputs}


# --- beyond the numbers with which a graph compares those of samples ------------------------------


def first_numbering(graph: Graph) -> Op | None:
    """The first op that tells samples apart by their numbers, or by how many there are.

    Looked for beyond the numbers with which the graph compares these; smaller ones have shown.
    """
    counted = next((op for op in graph.ops if _takes_by_number(graph, op)), None)
    if counted is not None:
        return counted
    trials = _trials(graph)
    if not trials.samples:
        return None
    return trials.mixing or mixing_among(graph, trials.samples, {}, _ends(graph))


def _ends(graph: Graph) -> frozenset[str]:
    return graph.loss_inputs.union(graph.output_values)


def _takes_by_number(graph: Graph, op: Op) -> bool:
    return op.name not in graph.loss_only and takes_by_number(graph, op)


def refuse_numbering_in_loss(graph: Graph) -> None:
    """Refuses a loss that tells samples apart by their numbers, or by how many there are."""
    if graph.loss is None or graph.loss.over_batch or on_meta(graph):
        return
    counting = counting_in_loss(graph)
    many = max(_trials(graph).samples, _SEVERAL if counting else 0)
    if not many:
        return
    group = taken_together(graph).samples
    # Three parts of so many begin at places that have no divisor in common: no period hides there.
    odd = group * (many + (1 - many) % _PARTS)
    if _adds_up(graph, [graph.batch_size] * 2) and not _adds_up(
        graph, even_sizes(odd, _PARTS, group)
    ):
        asking = [counting.source] if counting else []
        lines = [rule.source for rule in all_rules(graph)] or asking
        raise ModelError(
            "the loss of a mini-batch is not that of its micro-batches put together: it tells "
            "samples apart by their numbers, or by how many there are",
            location=lines[-1],
            hint=HINT,
        )


_PARTS = 3
_SEVERAL = 13
"""Samples among which a period shows that is no longer than a third of them."""


@dataclass(frozen=True, slots=True)
class _Trials:
    """What rules about the number of samples are tried.

    Attributes:
        samples: beyond all rules that can be tried; 0 where there are none.
        mixing: the op that is at fault already among the samples that are always tried.
        untried: the first that takes too long.
    """

    samples: int = 0
    mixing: Op | None = None
    untried: SampleRule | None = None


def _trials(graph: Graph) -> _Trials:
    return graph.once("trials of sample rules", lambda: _find_trials(graph))


def _find_trials(graph: Graph) -> _Trials:
    rules = [rule for rule in all_rules(graph) if rule.samples > SAMPLES]
    if on_meta(graph):
        return _Trials(untried=next((rule for rule in rules if rule.samples > MANY), None))
    if not rules:
        return _Trials()
    started = time.process_time()
    mixing = mixing_among(graph, SAMPLES, {}, _ends(graph))
    seconds = time.process_time() - started
    tried = [rule for rule in rules if may_be_tried(2 * rule.samples, SAMPLES, seconds)]
    untried = next((rule for rule in rules if rule not in tried), None)
    if not tried:
        return _Trials(untried=untried)
    return _Trials(2 * tried[-1].samples, mixing, untried)


def with_limit(plan: Plan) -> Plan:
    """The plan whose graph says in how many samples it was tried, where that is not in any."""
    graph = plan.known_graph
    pieces = _trials(graph).untried
    return dataclasses.replace(plan, graph=dataclasses.replace(graph, untried_in_pieces=pieces))


def _adds_up(graph: Graph, sizes: Sequence[int]) -> bool:
    """Whether the loss of some samples is that of parts of so many put together; where that cannot
    be tried, too."""
    assert graph.loss is not None
    count = sum(sizes)
    rows = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            names = {graph.loss.value, *(term.value for term in graph.loss.summands)}
            whole = values_of(graph, {}, range(count), count, keep=names)[graph.loss.value]
            made = [values_of(graph, {}, part, count, keep=names) for part in rows]
            inputs = [inputs_of(graph, part, count) for part in rows]
            shares = loss_shares(graph, graph.tensors, inputs, sizes)
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return True
    terms = tuple(tuple(v[term.value] for term in graph.loss.summands) for v in made)
    return Losses(whole, terms, shares).equal
