"""Tries graphs beyond the numbers with which they compare those of samples."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.comparable_runs import MANY, EvenDraws, may_be_tried
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.sizes import SampleRule
from gpipe_compiler.passes.batch_rules import all_rules
from gpipe_compiler.passes.selections import takes_by_number
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.validate.loss_splitting import HINT, Losses, loss_shares
from gpipe_compiler.validate.some_samples import (
    PARTS,
    SAMPLES,
    first_mixing,
    inputs_of,
    mixing_among,
    on_meta,
    values_of,
    values_of_parts,
)


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


def _ends(graph: Graph) -> set[str]:
    """What the outputs and the loss are computed from."""
    read = {name for op in graph.ops if op.name in graph.loss_only for name in op.inputs}
    return read.union(graph.output_values)


def _takes_by_number(graph: Graph, op: Op) -> bool:
    """Whether an op takes some of the rows that are selected, and the loss is not all it is for."""
    return op.name not in graph.loss_only and takes_by_number(graph, op)


def refuse_numbering_in_loss(graph: Graph) -> None:
    """Refuses a loss that tells samples apart by their numbers, or by how many there are.

    Raises:
        ModelError: naming the line of the op.
    """
    if graph.loss is None or graph.loss.over_batch:
        return
    many = _trials(graph).samples
    if many and _adds_up(graph, SAMPLES) and not _adds_up(graph, many):
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
    runs = values_of_parts(graph, {}, SAMPLES, PARTS)
    seconds = time.process_time() - started
    tried = [rule for rule in rules if may_be_tried(2 * rule.samples, SAMPLES, seconds)]
    untried = next((rule for rule in rules if rule not in tried), None)
    if not tried:
        return _Trials(untried=untried)
    return _Trials(2 * tried[-1].samples, first_mixing(runs, _ends(graph)), untried)


def with_limit(plan: Plan) -> Plan:
    """The plan whose graph says in how many samples it was tried, where that is not in any."""
    graph = plan.graph
    assert graph is not None
    pieces = _trials(graph).untried
    return dataclasses.replace(plan, graph=dataclasses.replace(graph, untried_in_pieces=pieces))


def _adds_up(graph: Graph, count: int) -> bool:
    """Whether the loss of so many samples is that of their halves put together; where that cannot
    be tried, too."""
    assert graph.loss is not None
    half = count // 2
    rows = (range(half), range(half, count))
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            whole = values_of(graph, {}, range(count), count)[graph.loss.value]
            made = [values_of(graph, {}, part, count) for part in rows]
            inputs = [inputs_of(graph, part, count) for part in rows]
            shares = loss_shares(graph, graph.tensors, inputs, [len(part) for part in rows])
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return True
    terms = tuple(tuple(v[term.value] for term in graph.loss.summands) for v in made)
    return Losses(whole, terms, shares).equal
