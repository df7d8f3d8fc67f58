"""Writes a loss that adds up means over different things as its terms, one for each."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
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
    RegionCall,
    StateRef,
)
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.ops import NoGrad, with_arguments, without_unread
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_functions import Summand, put
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.verbs import writes


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
    made = graph.replace(ops=(*kept, *tail.made), values={}, loss=loss)
    places = {op.name: place for place, op in enumerate(graph.ops)}
    changed = min((places[name] for name in adding | dropped), default=len(places))
    if all(stretch.end <= changed for stretch in graph.repeats):
        made = dataclasses.replace(made, repeats=graph.repeats)
    return annotate(made, graph.batch_size, graph.precision)


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
        sums = {}
        for mode in self.like:
            own = [self._scaled(summand) for summand in summands if summand.mode is mode]
            sums[mode] = self.add_up(own, mode) if own else self._number(0.0, mode)
        if Mode.ALWAYS in sums:
            return sums[Mode.ALWAYS]
        choice = ByMode(Ref(sums[Mode.TRAIN]), Ref(sums[Mode.EVAL]))
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
        call = MethodCall("new_full", (Ref(self.like[mode]), (), number))
        return self._new(call, "number", mode)

    def _new(self, call: Call, wish: str, mode: Mode = Mode.ALWAYS) -> str:
        names = (f"{wish}_{number}" for number in itertools.count())
        name = next(name for name in names if name not in self.taken)
        self.taken.add(name)
        self.made.append(Op(name, call, name, source=self.source, mode=mode))
        return name


# --- blocks in which a loss counts ----------------------------------------------------------------


def without_counting_regions(graph: Graph) -> Graph:
    """The graph, its loss without blocks that switch off gradients and write nothing in place, so
    that what the loss is divided by is seen: with their ops, and a `detach` of what they give.

    Args:
        graph: annotated; the result is not, where it is another one.
    """
    found = {op.name for op in graph.ops if op.name in graph.loss_only and _is_plain(graph, op)}
    if graph.loss is None or not found:
        return graph
    ops = [part for op in graph.ops for part in (_inside(op) if op.name in found else (op,))]
    return graph.replace(ops=tuple(ops), values={})


def _is_plain(graph: Graph, op: Op) -> bool:
    """Whether a block only computes on what it is given."""
    call = op.call
    if not isinstance(call, RegionCall) or call.context != NoGrad():
        return False
    return isinstance(op.result, tuple) and not any(
        not isinstance(inner.call, FunctionCall | MethodCall)
        or writes(inner)
        or "out" in inner.call.kwargs
        or any(True for _ in inner.states(graph.modules))
        for inner in call.body.ops
    )


def _inside(op: Op) -> Iterator[Op]:
    assert isinstance(op.call, RegionCall)
    assert isinstance(op.result, tuple)
    body = op.call.body
    given = dict(zip(body.inputs, op.call.args, strict=True))

    def outer(leaf: object) -> object:
        return given.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

    for inner in body.ops:
        call = with_arguments(inner.call, lambda argument: map_argument(outer, argument))
        yield dataclasses.replace(inner, call=call, module=op.module, mode=op.mode)
    for name, made in zip(op.result, body.outputs, strict=True):
        if isinstance(name, str):
            yield dataclasses.replace(
                op, name=name, result=name, call=MethodCall("detach", (outer(made),))
            )
