"""Writes a loss that adds up means over different things as its terms, one for each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from gpipe_compiler.ir import (
    Argument,
    ByMode,
    Call,
    FunctionCall,
    Graph,
    LossTerm,
    LossWeight,
    MethodCall,
    Mode,
    Op,
    Reduction,
    Ref,
    StateRef,
)
from gpipe_compiler.ir.arguments import renamed, value_names
from gpipe_compiler.ir.ops import map_result, with_arguments, without_unread
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_divisors import Divisor, guarded_sum
from gpipe_compiler.passes.loss_functions import Division, Summand, put
from gpipe_compiler.passes.loss_terms import Terms
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.verbs import verb, writes


@dataclass(frozen=True, slots=True)
class TermGroup:
    """Terms of the loss that are means over the same.

    Attributes:
        reduction: None where it is not known: a mean, when in doubt.
        weight: as in `LossTerm`.
    """

    reduction: Reduction | None
    weight: LossWeight | None
    summands: tuple[Summand, ...]

    @property
    def adds_up(self) -> bool:
        """Whether the shares of micro-batches add up to one, wherever something counts."""
        guard = self.weight and (self.weight.floor, self.weight.offset, self.weight.above)
        return self.reduction is not Reduction.SUM and guard in (None, (-math.inf, 0.0, -math.inf))


def with_terms(graph: Graph, groups: Sequence[TermGroup], added: Sequence[Op]) -> Graph | None:
    """The graph with these terms of its loss, annotated; None where that cannot be.

    The ops that added them up are dropped where nothing else reads what they make: they may write
    in place, and then what something else reads is another number than that of the term.

    Args:
        added: the ops of the graph that only add up terms, or scale sums of them.
    """
    assert graph.loss is not None
    summands = [summand for group in groups for summand in group.summands]
    scales = [step.args for summand in summands for step in summand.scale]
    taken = {s.value for s in summands if isinstance(s.value, str)}
    needed = {*graph.output_values, *value_names(tuple(scales)), *taken}
    # What adds terms up in one mode may make one in the other.
    adding = {op.name for op in added if taken.isdisjoint(op.outputs)}
    writers = effects(graph).writes

    def droppable(op: Op) -> bool:
        """Whether an op may go when nothing reads any more what it makes."""
        return op.name not in writers and any(name in graph.consumers for name in op.outputs)

    left = without_unread(graph.ops, graph.output_values, lambda op: op.name in adding)
    kept = without_unread(left, needed, droppable)
    dropped = {op.name for op in graph.ops}.difference(op.name for op in kept)
    apart = _apart_of_writes(graph, kept, groups, adding)
    if apart is None or _written_is_read(graph, adding, dropped):
        return None
    kept, groups, copied = apart
    summands = [summand for group in groups for summand in group.summands]
    scalars = {s.mode: s.value for s in reversed(summands) if isinstance(s.value, str)}
    if Mode.ALWAYS not in scalars and len(scalars) < len((Mode.TRAIN, Mode.EVAL)):
        return None  # in one mode nothing is made that a number could be like
    tail = Tail(graph, kept, scalars)
    terms = tuple(
        LossTerm(tail.sum(group.summands), group.reduction or Reduction.MEAN, group.weight)
        for group in groups
    )
    total = tail.add_up([term.value for term in terms])
    loss = dataclasses.replace(graph.loss, value=total, reduction=Reduction.SUM, terms=terms)
    if len(terms) == 1:
        reduction, weight = terms[0].reduction, terms[0].weight
        loss = dataclasses.replace(loss, reduction=reduction, weight=weight, terms=())
    made = graph.replace(ops=(*kept, *tail.made), values={}, loss=loss)
    places = {op.name: place for place, op in enumerate(graph.ops)}
    changed = min((places[name] for name in adding | dropped | copied), default=len(places))
    if all(stretch.end <= changed for stretch in graph.repeats):
        made = dataclasses.replace(made, repeats=graph.repeats)
    return annotate(made, graph.batch_size, graph.precision)


def _apart_of_writes(
    graph: Graph, ops: tuple[Op, ...], groups: Sequence[TermGroup], adding: Set[str]
) -> tuple[tuple[Op, ...], Sequence[TermGroup], Set[str]] | None:
    """The ops with copies of the terms over which sums are written that stay, as the model returns
    them; the terms, as these copies; and which ops made them.

    None where something else writes there, or where it scales a term.
    """
    summands = [summand for group in groups for summand in group.summands]
    terms = {summand.value for summand in summands if isinstance(summand.value, str)}
    scales = set(value_names(tuple(step.args for item in summands for step in item.scale)))
    found = effects(graph).writes
    stay = adding & {op.name for op in ops}
    written = frozenset[str]().union(*(found[name] for name in stay & found.keys()))
    others = frozenset[str]().union(*(found[name] for name in found.keys() - adding))
    if not written.isdisjoint(others & terms | scales):
        return None
    taken = {*graph.values, *(name for op in graph.ops for name in (op.name, *op.outputs))}
    names: dict[str, str] = {}
    for value in sorted(written & terms):
        names[value] = _free(f"{value}_term", taken)
        taken.add(names[value])
    made: list[Op] = []
    for op in ops:
        made.append(op)
        for value in filter(names.__contains__, op.outputs):
            call = MethodCall("clone", (Ref(value),))
            made.append(dataclasses.replace(op, name=names[value], result=names[value], call=call))
    makers = {graph.producer[value].name for value in names}
    return tuple(made), [_with_values(group, names) for group in groups], makers


def _written_is_read(graph: Graph, adding: set[str], dropped: set[str]) -> bool:
    """Whether something reads what an op that is dropped has written in place."""
    written = {
        graph.values[op.outputs[0]].storage
        for op in graph.ops
        if op.name in dropped and writes(op) and op.outputs
    }
    if not written:
        return False
    first = min(i for i, op in enumerate(graph.ops) if op.name in adding)
    read = {value for op in graph.ops[first:] if op.name not in dropped for value in op.inputs}
    read.update(graph.output_values)
    return any(name in graph.values and graph.values[name].storage in written for name in read)


@dataclass
class Tail:
    """The ops that make the terms, and the loss of these, at the end of a graph.

    Attributes:
        like: for each mode in which terms go into the loss, some scalar of the graph.
    """

    graph: Graph
    kept: Sequence[Op]
    like: Mapping[Mode, str]
    made: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.taken = {source.name for source in self.graph.inputs}
        self.taken.update(name for op in self.kept for name in (op.name, *op.outputs))
        assert self.graph.loss is not None
        maker = self.graph.producer.get(self.graph.loss.value)
        self.source = maker.source if maker is not None else None

    def sum(self, summands: Sequence[Summand]) -> str:
        """The sum of some terms, as a value: of those that go into the loss in each mode."""
        scaled = [(summand.mode, self._scaled(summand)) for summand in summands]
        if all(mode is Mode.ALWAYS for mode, _ in scaled):
            return self.add_up([value for _, value in scaled])
        sums = {}
        for mode in (Mode.TRAIN, Mode.EVAL):
            own = [value for of, value in scaled if of in (Mode.ALWAYS, mode)]
            sums[mode] = Ref(self.add_up(own, mode) if own else self._number(0.0, mode))
        choice = ByMode(sums[Mode.TRAIN], sums[Mode.EVAL])
        return self._new(FunctionCall(operator.pos, (choice,)), "term")

    def add_up(self, values: Sequence[str], mode: Mode = Mode.ALWAYS) -> str:
        total, *rest = values
        for value in rest:
            call = FunctionCall(operator.add, (Ref(total), Ref(value)))
            total = self._new(call, "term", mode)
        return total

    def _scaled(self, summand: Summand) -> str:
        value, mode = summand.value, summand.mode
        if isinstance(value, StateRef):
            value = self._new(MethodCall("clone", (value,)), "number", mode)
        elif not isinstance(value, str):
            value = self._number(value, mode)
        for step in summand.scale:
            scaled = dataclasses.replace(step, args=put(step.args, Ref(value)))
            value = self._new(scaled, "scaled", mode)
        return value

    def _number(self, number: float, mode: Mode) -> str:
        like = self.like.get(mode) or self.like[Mode.ALWAYS]
        call = MethodCall("new_full", (Ref(like), (), number))
        return self._new(call, "number", mode)

    def _new(self, call: Call, wish: str, mode: Mode = Mode.ALWAYS) -> str:
        names = (f"{wish}_{number}" for number in itertools.count())
        name = next(name for name in names if name not in self.taken)
        self.taken.add(name)
        self.made.append(Op(name, call, name, source=self.source, mode=mode))
        return name


# --- divisors that may be 0 in a part of a batch --------------------------------------------------

# A micro-batch's loss is not divided by 0, where that of the mini-batch is not. What is divided is
# no 0 where nothing counts: the focal loss of images without an object, or what weighs more and
# less than 0 by turns. So the terms of parts of a batch are divided by no less than a weight of 1
# gives, and that of the batch by its own.


def bare_terms(groups: Iterable[TermGroup]) -> list[Summand]:
    """The terms whose divisors may be 0 in a part of a batch in which they are not."""
    return [
        summand
        for group in groups
        if _is_bare(group)
        for summand in group.summands
        if isinstance(summand.term, Division)
    ]


def _is_bare(group: TermGroup) -> bool:
    return group.weight is not None and group.weight.least > -math.inf


def never_by_zero(graph: Graph, summands: Sequence[Summand]) -> Graph:
    """The graph, annotated, in which these terms are those of a part of a batch."""
    changed: dict[str, tuple[Op, ...]] = {}
    for value, found in _dividing(graph, summands).items():
        bounds = _bounded(_divisor(graph, value), value, found[0], {*graph.values})
        by = functools.partial(renamed, names={value: bounds[-1].name})
        for op in found:
            divided = dataclasses.replace(op, call=with_arguments(op.call, by))
            changed[op.name] = (*bounds, divided) if op is found[0] else (divided,)
    ops = tuple(part for op in graph.ops for part in changed.get(op.name, (op,)))
    first = min(place for place, op in enumerate(graph.ops) if op.name in changed)
    made = graph.replace(ops=ops, values={})
    if all(stretch.end <= first for stretch in graph.repeats):
        made = dataclasses.replace(made, repeats=graph.repeats)
    return annotate(made, graph.batch_size, graph.precision)


def are_returned(graph: Graph, summands: Iterable[Summand]) -> bool:
    """Whether the model returns anything that is made of these terms, which has to stay."""
    dividing = (op.name for found in _dividing(graph, summands).values() for op in found)
    return not graph.ancestors(graph.output_values).isdisjoint(dividing)


def copies_of_parts(
    graph: Graph, groups: Sequence[TermGroup], taken: Iterable[str] = ()
) -> tuple[list[Op], list[TermGroup]] | None:
    """Ops for the end of a graph, that make such terms beside the model's own, and the terms with
    them; None where the model writes them in place.

    Args:
        taken: names that the ops cannot have, besides those in the graph.
    """
    names = {*graph.values, *taken, *(name for op in graph.ops for name in op.outputs)}
    bare = bare_terms(groups)
    made: list[Op] = []
    values: dict[str, str] = {}
    for value, dividing in _dividing(graph, bare).items():
        bounds = _bounded(_divisor(graph, value), value, dividing[0], names)
        names.update(op.name for op in bounds)
        made += bounds
        within = {op.name: {value: bounds[-1].name} for op in dividing}
        ends = [str(s.value) for s in bare if getattr(s.term, "divisor", "") == value]
        needed = graph.ancestors(ends)
        for op in graph.ops:
            own = within.get(op.name, {})
            if op.name not in needed or not (own or any(name in values for name in op.inputs)):
                continue
            if writes(op):
                return None
            for name in op.outputs:
                values[name] = _free(f"{name}_part", names)
                names.add(values[name])
            call = with_arguments(op.call, functools.partial(renamed, names={**values, **own}))
            result = map_result(values.__getitem__, op.result)
            name = values.get(op.name) or _free(f"{op.name}_part", names)
            made.append(dataclasses.replace(op, name=name, result=result, call=call))
    return made, [_with_values(item, values) if _is_bare(item) else item for item in groups]


def _with_values(group: TermGroup, values: Mapping[str, str]) -> TermGroup:
    summands = (
        dataclasses.replace(summand, value=values.get(summand.value, summand.value))
        if isinstance(summand.value, str)
        else summand
        for summand in group.summands
    )
    return dataclasses.replace(group, summands=tuple(summands))


def _divisor(graph: Graph, value: str) -> Divisor:
    divisor = guarded_sum(Terms(graph), value)
    assert divisor is not None
    return divisor


def _bounded(divisor: Divisor, value: str, like: Op, taken: set[str]) -> list[Op]:
    """Ops that bound a divisor from below by what it is of a weight of 1, where another op stands;
    the last one gives it."""
    name = _free(value, taken)
    least: Argument = int(divisor.factor) if divisor.factor.is_integer() else divisor.factor
    calls: list[tuple[str, Call]] = []
    if verb(divisor.op) == "mean":
        number, share = _free(f"{name}_of", taken), _free(f"{name}_share", taken)
        calls.append((number, FunctionCall(torch.numel, divisor.op.call.args[:1])))
        calls.append((share, FunctionCall(operator.truediv, (least, Ref(number)))))
        least = Ref(share)
    calls.append((name, MethodCall("clamp", (Ref(value),), {"min": least})))
    return [dataclasses.replace(like, name=own, result=own, call=call) for own, call in calls]


def _free(wish: str, taken: set[str]) -> str:
    number, name = 1, wish
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name


def _dividing(graph: Graph, summands: Iterable[Summand]) -> dict[str, list[Op]]:
    """For each divisor, the ops that divide by it in these terms."""
    found: dict[str, dict[str, Op]] = {}
    for term in (summand.term for summand in summands):
        assert isinstance(term, Division)
        behind = {term.op.name, *graph.ancestors(term.op.inputs)}
        for op in graph.ops:
            if op.name in behind and verb(op) == "div" and op.call.args[1] == Ref(term.divisor):
                found.setdefault(term.divisor, {})[op.name] = op
    return {value: [*ops.values()] for value, ops in found.items()}
