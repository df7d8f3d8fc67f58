"""The error for a model whose samples depend on each other, with the op in which they meet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.batch_dims import FoundBatch
from gpipe_compiler.frontend.comparable_runs import (
    MANY,
    EvenDraws,
    may_be_tried,
    with_other_weights,
)
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.ir import Graph, Input, Mode, Op
from gpipe_compiler.ir.arguments import choices
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.own_functions import own_functions, own_functions_of
from gpipe_compiler.ir.sizes import SampleRule, in_order
from gpipe_compiler.passes.batch_rules import all_rules
from gpipe_compiler.passes.cross_sample_ops import batchnorm_ops, mixing_ops
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.selections import takes_by_number
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.spec import BatchNorm
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare
from gpipe_compiler.runtime.train.data import resized
from gpipe_compiler.validate.float_types import double
from gpipe_compiler.validate.loss_splitting import HINT, Losses, loss_shares
from gpipe_compiler.validate.mixing_backward import function_that_mixes

_SAMPLES, _PARTS = 6, ((4, 0), (1, 2, 3, 5))
"""Samples with which the op at fault is looked for, and those that run apart from the others."""


def refuse_mixing(found: FoundBatch, plan: Plan) -> None:
    """Refuses a plan with several micro-batches of samples that depend on each other.

    Raises:
        ModelError: naming the input and its dimension, and the line of the op at fault.
    """
    parts = plan.microbatches * (plan.replicas if plan.training else 1)
    graph = plan.graph
    assert graph is not None
    if parts == 1:
        return
    op = _first_mixing(graph, found.subject.model) if found.mixes else _first_numbering(graph)
    if not found.mixes and op is None:
        _refuse_numbering_in_loss(graph)
        if plan.training:
            _refuse_mixing_in_training(plan, graph, found.subject.model)
        return
    first = next(source for source in graph.inputs if source.batched)
    what = "the model" if op is None else op.name
    raise ModelError(
        f"{what} takes the samples of a batch together, if they lie in dimension "
        f"{first.batch_dim} of {first.name}: outputs for some of them are not those rows of the "
        "outputs for all; no other dimension was found along which they are",
        location=line_of_forward(found.subject.model) if op is None else op.source,
        hint=f"say with --batch-dim {first.name}=1 which dimension is the batch, and with "
        "--batch-dim NAME=none which inputs all samples share; compile with --microbatches 1; or "
        "accept with --per-microbatch that every micro-batch is taken by itself",
    )


def _refuse_mixing_in_training(plan: Plan, graph: Graph, model: nn.Module) -> None:
    """Refuses what takes samples together in training alone.

    Beside BatchNorm, which hides what follows, and where something writes to buffers, that is left
    to validation; so is what takes the whole mini-batch by `BatchNorm.EXACT`.

    Raises:
        ModelError: naming the line of the op at fault.
    """
    joint = plan.batchnorm is BatchNorm.EXACT and mixing_ops(graph) - graph.loss_only
    if on_meta(graph) or joint:
        return
    _refuse_mixing_backward(graph)
    if not any(map(_differs_in_training, graph.ops)):
        return
    if batchnorm_ops(graph, model) or effects(graph).state_writes:
        return
    op = _first_in_training(graph)
    if op is not None:
        raise ModelError(
            f"{op.name} takes the samples of a batch together in training: what it makes of some "
            "of them is not those rows of what it makes of all",
            location=op.source,
            hint="compile with --microbatches 1, or accept with --per-microbatch that every "
            "micro-batch is taken by itself",
        )


def _refuse_mixing_backward(graph: Graph) -> None:
    """Refuses a hook, or a function with a backward of its own, that takes gradients together.

    Raises:
        ModelError: naming the line that calls it.
    """
    if next(own_functions(graph), None) is None:
        return
    wide = {name: double(tensor) for name, tensor in graph.tensors.items()}

    def run(rows: Sequence[int]) -> object:
        with torch.no_grad(), EvenDraws():
            return _values(graph, wide, rows, _SAMPLES, training=True)

    try:
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(0)
            function = function_that_mixes(run, _SAMPLES, _PARTS)
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return
    if function is None:
        return
    what = "a hook on gradients" if function.text else f"the backward of {function.cls.__name__}"
    raise ModelError(
        f"{what} takes the samples of a batch together: what it makes of some of their gradients "
        "is not those rows of what it makes of all, or does not add up to it",
        location=next(op.source for op in graph.ops if function in own_functions_of(op)),
        hint="compile with --microbatches 1, or accept with --per-microbatch that every "
        "micro-batch is taken by itself; a bound on the gradient of each sample is exact",
    )


def _differs_in_training(op: Op) -> bool:
    return op.mode is Mode.TRAIN or any(choices(op.arguments))


def _first_in_training(graph: Graph) -> Op | None:
    """The first op in training that makes rows which are wrong, of those that the loss takes.

    None where they are right, or where that is not seen: where the graph does not run in 64 bits.
    """
    ends = {name for op in graph.ops if op.name in graph.loss_only for name in op.inputs}
    wide = {name: double(tensor) for name, tensor in graph.tensors.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            whole = _values(graph, wide, range(_SAMPLES), _SAMPLES, training=True)
            for rows in _PARTS:
                part = _values(graph, wide, rows, _SAMPLES, training=True)
                both = _Both(graph, whole, part, rows, _SAMPLES)
                if any(map(both.is_wrong, ends)):
                    return both.root()
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return None
    return None


def _first_mixing(graph: Graph, model: nn.Module) -> Op | None:
    """The first op in eval mode that takes rows which are right and makes some that are not.

    None where it cannot be found: on meta, or where the graph does not run on so few samples. What
    the first weights hide is looked for with others.
    """
    if on_meta(graph):
        return None
    moved = with_other_weights(model)
    first: Mapping[str, torch.Tensor] = {}
    others = first if moved is None else dict(moved.named_parameters())
    tried = ((_SAMPLES, first), (_SAMPLES, others), (MANY, first))
    found = (_mixing_among(graph, count, other) for count, other in tried)
    return next((op for op in found if op is not None), None)


def _first_numbering(graph: Graph) -> Op | None:
    """The first op that tells samples apart by their numbers, or by how many there are.

    Looked for beyond the numbers with which the graph compares these; smaller ones have shown.
    """
    counted = next((op for op in graph.ops if _takes_by_number(graph, op)), None)
    if counted is not None:
        return counted
    many = _trials(graph).samples
    if not many:
        return None
    read = {name for op in graph.ops if op.name in graph.loss_only for name in op.inputs}
    ends = read.union(graph.output_values)
    return _mixing_among(graph, _SAMPLES, {}, ends) or _mixing_among(graph, many, {}, ends)


def _takes_by_number(graph: Graph, op: Op) -> bool:
    """Whether an op takes some of the rows that are selected, and the loss is not all it is for."""
    return op.name not in graph.loss_only and takes_by_number(graph, op)


def _refuse_numbering_in_loss(graph: Graph) -> None:
    """Refuses a loss that tells samples apart by their numbers, or by how many there are.

    Raises:
        ModelError: naming the line of the op.
    """
    if graph.loss is None or graph.loss.over_batch:
        return
    many = _trials(graph).samples
    if many and _adds_up(graph, _SAMPLES) and not _adds_up(graph, many):
        raise ModelError(
            "the loss of a mini-batch is not that of its micro-batches put together: it tells "
            "samples apart by their numbers, or by how many there are",
            location=all_rules(graph)[-1].source,
            hint=HINT,
        )


@dataclass(frozen=True, slots=True)
class _Trials:
    """What rules about the number of samples are tried.

    Attributes:
        samples: beyond all rules that can be tried; 0 where there are none.
        untried: the first that takes too long.
    """

    samples: int = 0
    untried: SampleRule | None = None


def _trials(graph: Graph) -> _Trials:
    return graph.once("trials of sample rules", lambda: _find_trials(graph))


def _find_trials(graph: Graph) -> _Trials:
    rules = [rule for rule in all_rules(graph) if rule.samples > _SAMPLES]
    if on_meta(graph):
        return _Trials(untried=next((rule for rule in rules if rule.samples > MANY), None))
    if not rules:
        return _Trials()
    started = time.process_time()
    _values_of_parts(graph, {}, _SAMPLES, _PARTS)
    seconds = time.process_time() - started
    tried = [rule for rule in rules if may_be_tried(2 * rule.samples, _SAMPLES, seconds)]
    untried = next((rule for rule in rules if rule not in tried), None)
    return _Trials(2 * tried[-1].samples if tried else 0, untried)


def with_limit(plan: Plan) -> Plan:
    """The plan whose graph says for how many samples it was tried, where that is not for any."""
    graph = plan.graph
    assert graph is not None
    rules = [rule for rule in (graph.untried, _trials(graph).untried) if rule is not None]
    untried = next(iter(in_order(rules)), None)
    return dataclasses.replace(plan, graph=dataclasses.replace(graph, untried=untried))


def _adds_up(graph: Graph, count: int) -> bool:
    """Whether the loss of so many samples is that of their halves put together; where that cannot
    be tried, too."""
    assert graph.loss is not None
    half = count // 2
    rows = (range(half), range(half, count))
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            whole = _values(graph, {}, range(count), count)[graph.loss.value]
            made = [_values(graph, {}, part, count) for part in rows]
            inputs = [_inputs(graph, part, count) for part in rows]
            shares = loss_shares(graph, graph.tensors, inputs, [len(part) for part in rows])
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return True
    terms = tuple(tuple(v[term.value] for term in graph.loss.summands) for v in made)
    return Losses(whole, terms, shares).equal


def _mixing_among(
    graph: Graph,
    count: int,
    other: Mapping[str, torch.Tensor],
    ends: Collection[str] | None = None,
) -> Op | None:
    """The first op that makes rows which are wrong, among so many samples.

    Args:
        other: as for `_values`.
        ends: values of which one has to be wrong, unless some samples have no rows anywhere; what
            lies before them may have its rows in another order. None where it is known that
            samples meet.
    """
    parts = _PARTS if count == _SAMPLES else (_PARTS[1], range(1, count))
    both = _values_of_parts(graph, other, count, parts)
    wrong = [values for values in both if ends is None or values.differ_at(ends)]
    return next((op for op in (values.root() for values in wrong) if op is not None), None)


def _values_of_parts(
    graph: Graph,
    other: Mapping[str, torch.Tensor],
    count: int,
    parts: Sequence[Sequence[int]],
) -> list[_Both]:
    """The values for so many samples beside those for parts of them; none where the graph does
    not run on so many."""
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            whole = _values(graph, other, range(count), count)
            return [
                _Both(graph, whole, _values(graph, other, part, count), part, count)
                for part in parts
            ]
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return []


@dataclass(frozen=True, eq=False)
class _Both:
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


def _values(
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
    given = _inputs(graph, rows, samples)
    if training:
        given = {name: double(tensor) for name, tensor in given.items()}
    return Interpreter(graph, states, training=training).run(given)


def _inputs(graph: Graph, rows: Sequence[int], samples: int) -> dict[str, torch.Tensor]:
    """Some of so many samples of the example, by the names of the inputs."""

    def some(source: Input) -> torch.Tensor:
        dim = source.batch_dim
        tensor = resized(graph.example[source.name], dim, samples)
        return tensor.clone() if dim is None else tensor.index_select(dim, torch.tensor(rows))

    return {source.name: some(source) for source in graph.inputs}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    (row,) = compare({ComparedKind.OUTPUT: {"": other}}, {ComparedKind.OUTPUT: {"": one}})
    return row.passed
