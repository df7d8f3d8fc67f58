"""Writes a loss that adds up means over different things as its terms, one for each."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.ir import (
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
    Value,
)
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.ops import without_unread
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_functions import Summand, put


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
    """The graph with these terms of its loss; None where that cannot be.

    The ops that added them up are dropped where nothing else reads what they make: they may write
    in place, and then what something else reads is another number than that of the term.

    Args:
        added: the ops of the graph that only add up terms, or scale sums of them.
    """
    assert graph.loss is not None
    adding = {op.name for op in added}
    summands = [summand for group in groups for summand in group.summands]
    scales = [step.args for summand in summands for step in summand.scale]
    needed = {*graph.output_values, *value_names(tuple(scales))}
    needed.update(s.value for s in summands if isinstance(s.value, str))
    writers = effects(graph).writes

    def droppable(op: Op) -> bool:
        """Whether an op may go when nothing reads any more what it makes."""
        return op.name not in writers and any(name in graph.consumers for name in op.outputs)

    left = without_unread(graph.ops, graph.output_values, lambda op: op.name in adding)
    kept = without_unread(left, needed, droppable)
    dropped = {op.name for op in graph.ops}.difference(op.name for op in kept)
    lasting = [op for op in kept if op.name in adding]
    if any(map(writes, lasting)) or _written_is_read(graph, adding, dropped):
        return None
    scalars = {s.mode: s.value for s in reversed(summands) if isinstance(s.value, str)}
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
    known = tail.values if all(map(_is_scalar, summands)) else {}
    made = graph.replace(ops=(*kept, *tail.made), values=known, loss=loss)
    before = min(
        (graph.ops.index(graph.op_of[name]) for name in adding | dropped), default=len(graph.ops)
    )
    if all(stretch.end <= before for stretch in graph.repeats):
        made = dataclasses.replace(made, repeats=graph.repeats)
    return made


def _is_scalar(summand: Summand) -> bool:
    """Whether a term is a scalar from the first step on, and no element of a tensor."""
    elements = (getattr(step, "function", None) is operator.getitem for step in summand.scale)
    return not isinstance(summand.value, StateRef) and not any(elements)


def writes(op: Op) -> bool:
    """Whether an op that adds or scales terms does so in place."""
    match op.call:
        case FunctionCall(function=function):
            return function in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
        case MethodCall(method=method):
            return method.endswith("_")
        case _:
            return True


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
    values: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = {name for op in self.kept for name in op.outputs}
        made.update(source.name for source in self.graph.inputs)
        self.values = {name: known for name, known in self.graph.values.items() if name in made}
        self.storage = max((known.storage for known in self.graph.values.values()), default=0)
        assert self.graph.loss is not None
        maker = self.graph.producer.get(self.graph.loss.value)
        self.source = maker.source if maker is not None else None

    def sum(self, summands: Sequence[Summand]) -> str:
        """The sum of some terms, as a value: of those that go into the loss in each mode."""
        sums = {}
        for mode in self.like:
            own = [self._scaled(summand) for summand in summands if summand.mode is mode]
            sums[mode] = self.add_up(own, mode) if own else self._number(0.0, mode)
        if Mode.ALWAYS in sums:
            return sums[Mode.ALWAYS]
        choice = ByMode(Ref(sums[Mode.TRAIN]), Ref(sums[Mode.EVAL]))
        return self._new(FunctionCall(operator.pos, (choice,)), "term", sums[Mode.TRAIN])

    def add_up(self, values: Sequence[str], mode: Mode = Mode.ALWAYS) -> str:
        """The sum of some values."""
        total, *rest = values
        for value in rest:
            call = FunctionCall(operator.add, (Ref(total), Ref(value)))
            total = self._new(call, "term", total, mode)
        return total

    def _scaled(self, summand: Summand) -> str:
        value, mode = summand.value, summand.mode
        if isinstance(value, StateRef):
            value = self._new(MethodCall("clone", (value,)), "number", self.like[mode], mode)
        elif not isinstance(value, str):
            value = self._number(value, mode)
        for step in summand.scale:
            scaled = dataclasses.replace(step, args=put(step.args, Ref(value)))
            value = self._new(scaled, "scaled", value, mode)
        return value

    def _number(self, number: float, mode: Mode) -> str:
        like = self.like[mode]
        return self._new(MethodCall("new_full", (Ref(like), (), number)), "number", like, mode)

    def _new(self, call: Call, wish: str, like: str, mode: Mode = Mode.ALWAYS) -> str:
        taken = {*self.values, *(op.name for op in (*self.kept, *self.made))}
        number = 0
        while f"{wish}_{number}" in taken:
            number += 1
        name = f"{wish}_{number}"
        self.made.append(Op(name, call, name, source=self.source, mode=mode))
        self.storage += 1
        self.values[name] = dataclasses.replace(self.values[like], name=name, storage=self.storage)
        return name
