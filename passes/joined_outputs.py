"""How outputs without a row for each sample follow from those of the micro-batches.

Told from the ops that reduce the batch and from what follows them: the sum over a batch is the sum
over its micro-batches, scaled or not; a root of it is not the sum of roots. The walk goes forward
over the graph. What it does not know cannot be put together, and counts as `Joined.APART`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    ModuleCall,
    Op,
    Reduction,
    Ref,
    ValueKind,
)
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.graph import found_once
from gpipe_compiler.ir.ops import in_one_mode
from gpipe_compiler.ir.sizes import BATCH, asked, grows_with_batch
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_functions import loss_arguments, mean_over_targets, reduction_of
from gpipe_compiler.passes.verbs import MOVES, number_of, verb
from gpipe_compiler.runtime.sizes import sizes_in
from gpipe_compiler.runtime.spec import Joined


class Unjoined(Enum):
    """Values that are no output which is put together by adding or comparing."""

    ROWS = "rows"
    """With a batch dimension, each sample by itself."""
    MIXED = "mixed"
    """With a batch dimension, and dependent on a reduction over the batch."""
    COUNT = "count"
    """A number that goes with the samples."""


Way = Joined | Unjoined

_REDUCTIONS: Mapping[str, Joined] = {
    "sum": Joined.SUM,
    "nansum": Joined.SUM,
    "count_nonzero": Joined.SUM,
    "matmul": Joined.SUM,
    "mm": Joined.SUM,
    "dot": Joined.SUM,
    "mean": Joined.MEAN,
    "max": Joined.MAX,
    "amax": Joined.MAX,
    "any": Joined.MAX,
    "min": Joined.MIN,
    "amin": Joined.MIN,
    "all": Joined.MIN,
}
"""The result of the reduction of rows; of a product of rows, the sum over them."""

_AGAIN: Mapping[Joined, frozenset[str]] = {
    Joined.SUM: frozenset({"sum", "mean"}),
    Joined.MEAN: frozenset({"sum", "mean"}),
    Joined.MAX: frozenset({"max", "amax", "any"}),
    Joined.MIN: frozenset({"min", "amin", "all"}),
}
"""Reductions over further dimensions that change nothing."""

_SAME = MOVES | {"unflatten", "narrow", "movedim"}
"""What moves elements, or changes their type."""

_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow"})

_RISING = frozenset({"exp", "log", "log1p", "sqrt", "relu", "sigmoid", "tanh"})
"""What keeps the order of numbers."""

_FLIPPED = {Joined.MAX: Joined.MIN, Joined.MIN: Joined.MAX}


def _asks_type(op: Op) -> bool:
    """Whether an op asks for a dtype, which goes with the precision alone."""
    match op.call:
        case FunctionCall(function=function, args=(_, "dtype")):
            return function is getattr
    return False


def joined_outputs(graph: Graph) -> Mapping[str, Joined]:
    """For each output without a batch dimension, how it is put together."""
    names = [
        name
        for name in value_names(graph.outputs)
        if graph.values[name].kind is ValueKind.TENSOR and graph.values[name].batch_dim is None
    ]
    written = effects(graph).writes if names else {}
    if graph.batched.isdisjoint(names) and not any(written.values()):
        return dict.fromkeys(names, Joined.SAME)
    found = ways_of(graph)
    joined = {
        name: way if isinstance(way := found[name], Joined) else Joined.APART for name in names
    }
    return {**joined, **dict.fromkeys(graph.output_terms, Joined.TERMS)}


def apart_outputs(graph: Graph) -> list[str]:
    """The outputs of a graph that do not follow from those of micro-batches."""
    return [name for name, way in joined_outputs(graph).items() if way is Joined.APART]


_KINDS = {Joined.SUM: Reduction.SUM, Joined.MEAN: Reduction.MEAN}


def kind_of(graph: Graph, value: str) -> Reduction | None:
    """Whether a value of an annotated graph is a sum over samples or their mean, as far as that is
    known."""
    way = ways_of(graph)[value]
    return _KINDS.get(way) if isinstance(way, Joined) else None


@found_once
def ways_of(graph: Graph) -> Mapping[str, Way]:
    """Of every value of an annotated graph, how it depends on the samples."""
    return _Walk(graph, effects(graph).writes).ways()


@dataclass(frozen=True)
class _Walk:
    """One walk over an annotated graph."""

    graph: Graph
    written: Mapping[str, frozenset[str]]

    def ways(self) -> Mapping[str, Way]:
        found: dict[str, Way] = {}
        for source in self.graph.inputs:
            found[source.name] = Unjoined.ROWS if source.batched else Joined.SAME
        for op in self.graph.ops:
            way = self._op(op, found)
            first = op.result[:1] if isinstance(op.result, tuple) else op.outputs
            for name in op.outputs:
                # A maximum over a dimension comes with its indices, which lie in a micro-batch.
                extra = name not in first and way in (Joined.MAX, Joined.MIN)
                found[name] = Joined.APART if extra else self._value(name, way)
            for name in self.written.get(op.name, ()):
                found[name] = self._value(name, way)
        return found

    @cached_property
    def _numbers(self) -> Mapping[str, Argument]:
        return shape_values(self.graph)

    def _value(self, name: str, way: Way) -> Way:
        known = self.graph.values[name]
        if known.kind is ValueKind.TENSOR:
            if not known.splittable:
                return Joined.APART
            if known.batch_dim is not None:
                return Unjoined.MIXED if way is Unjoined.MIXED else Unjoined.ROWS
            return Joined.APART if isinstance(way, Unjoined) else way
        if name in self._numbers:
            counts = BATCH in sizes_in(asked(self._numbers[name]))
            return Unjoined.COUNT if counts else Joined.SAME
        return way

    def _op(self, op: Op, found: Mapping[str, Way]) -> Way:
        """What an op makes, if it has no batch dimension; of one that has, whether it mixes."""
        ways = {
            self._in_one_mode(in_one_mode(op, training=training), found)
            for training in ((True, False) if op.has_choices else (True,))
        }
        if len(ways) == 1:
            return ways.pop()
        if self._makes_rows(op):
            return Unjoined.MIXED if Unjoined.MIXED in ways else Unjoined.ROWS
        # Of numbers that are all the same, each of these is that number; their sum is not.
        rest = ways - {Joined.SAME}
        return rest.pop() if rest in ({Joined.MEAN}, {Joined.MAX}, {Joined.MIN}) else Joined.APART

    def _in_one_mode(self, op: Op, found: Mapping[str, Way]) -> Way:
        # A hook may read others, and a cast takes their type.
        read = op.inputs[:1] if verb(op) in ("clone", "type_as", "to") else op.inputs
        ways = {found[name] for name in read} - {Joined.SAME}
        if not ways or verb(op).startswith("new_") or _asks_type(op):
            return Joined.SAME
        if self._makes_rows(op):
            counted = Unjoined.COUNT in ways and verb(op) in _ARITHMETIC
            mixes = counted or ways - {Unjoined.ROWS, Unjoined.COUNT}
            return Unjoined.MIXED if mixes else Unjoined.ROWS
        named = {found[name] for item in op.call.kwargs.values() for name in value_names(item)}
        if named - {Joined.SAME} or Unjoined.MIXED in ways:
            return Joined.APART
        if ways == {Unjoined.ROWS}:
            return self._reduced(op, found)
        args = [self._argument(item, found) for item in op.call.args]
        if len(ways) == 1:
            return self._kept(op, next(iter(ways)), args, found)
        return self._by_count(op, args)

    def _makes_rows(self, op: Op) -> bool:
        return any(self.graph.values[name].batch_dim is not None for name in op.outputs)

    def _argument(self, item: Argument, found: Mapping[str, Way]) -> Way:
        ways = {found[name] for name in value_names(item)} - {Joined.SAME}
        return ways.pop() if len(ways) == 1 else Joined.APART if ways else Joined.SAME

    def _reduced(self, op: Op, found: Mapping[str, Way]) -> Way:
        """Rows that become something without a batch dimension."""
        call, name = op.call, verb(op)
        if loss_arguments(self.graph, op) is not None:
            # A mean over class numbers is one over those that are not ignored.
            counted = mean_over_targets(self.graph, op) is not None
            kind = None if counted else reduction_of(self.graph, op)
            return Joined.APART if kind is None else Joined(kind.value)
        rows = [item for item in call.args if Unjoined.ROWS is self._argument(item, found)]
        several = name in ("matmul", "mm", "dot")
        if name not in _REDUCTIONS or len(rows) != (2 if several else 1) or rows[0] != call.args[0]:
            return Joined.APART
        return _REDUCTIONS[name]

    def _kept(self, op: Op, way: Way, args: Sequence[Way], found: Mapping[str, Way]) -> Way:
        """Something of one kind, and what is the same for all."""
        name = verb(op)
        if isinstance(way, Unjoined) or way is Joined.APART:
            return Joined.APART
        if isinstance(op.call, ModuleCall):
            linear = issubclass(self.graph.modules[op.call.module].cls, nn.Linear | nn.Identity)
            return way if linear and way is Joined.MEAN else Joined.APART
        if name in _SAME:
            return self._moved(op, name, way, found)
        if name in _AGAIN.get(way, ()) and args[0] is way and Joined.APART not in args[1:]:
            return way
        if way in (Joined.SUM, Joined.MEAN):
            return self._linear(op, name, way, args)
        return self._ordered(op, name, way, args)

    def _moved(self, op: Op, name: str, way: Joined, found: Mapping[str, Way]) -> Way:
        """Elements as they were."""
        source = op.call.args[0]
        if isinstance(source, tuple | list):  # what all micro-batches have would be summed, too
            alike = all(self._argument(item, found) is way for item in source)
            return way if alike or way is not Joined.SUM else Joined.APART
        if not isinstance(source, Ref):
            return Joined.APART
        if self.graph.values[source.name].kind is not ValueKind.TENSOR:
            # Of the pair of a maximum and its indices the first.
            return way if name == "getitem" and op.call.args[1] == 0 else Joined.APART
        was, to = self.graph.values[source.name].dtype, self.graph.values[op.outputs[0]].dtype
        assert was is not None
        assert to is not None
        exact = to == was or to.is_floating_point or to.is_complex or was == torch.bool
        return way if exact else Joined.APART

    def _linear(self, op: Op, name: str, way: Joined, args: Sequence[Way]) -> Way:
        match name:
            case "neg":
                return way
            case "add" | "sub":
                others = (x for x, arg in zip(op.call.args, args, strict=True) if arg is not way)
                sums = way is Joined.MEAN or all(
                    number_of(self.graph, other) == 0 for other in others
                )
                return way if sums else Joined.APART
            case "mul" | "matmul" | "mm":
                return way if sorted(arg is way for arg in args) == [False, True] else Joined.APART
            case "div":
                divided = args == [way, Joined.SAME] and not op.call.kwargs
                return way if divided else Joined.APART
            case _:
                return Joined.APART

    def _ordered(self, op: Op, name: str, way: Joined, args: Sequence[Way]) -> Way:
        if op.call.kwargs and name != "clamp":
            return Joined.APART
        if name in ("neg", "logical_not"):
            return _FLIPPED[way]
        if name in _RISING | {"clamp"} or (name == "add" and args.count(way) == 1):
            return way
        if name == "sub" and args.count(way) == 1:
            return way if args[0] is way else _FLIPPED[way]
        if name in ("mul", "div") and len(args) == 2 and args[0] is way:
            factor = op.call.args[1]
            positive = isinstance(factor, int | float) and 0 < factor < math.inf
            return way if positive else Joined.APART
        same = {Joined.MAX: ("maximum", "max"), Joined.MIN: ("minimum", "min")}[way]
        return way if name in same else Joined.APART

    def _by_count(self, op: Op, args: Sequence[Way]) -> Way:
        """A sum divided by the samples, a mean times them."""
        match verb(op), *args:
            case "div", Joined.SUM, Unjoined.COUNT if not op.call.kwargs:
                way, factor = Joined.MEAN, op.call.args[1]
            case "mul", Joined.MEAN, Unjoined.COUNT:
                way, factor = Joined.SUM, op.call.args[1]
            case "mul", Unjoined.COUNT, Joined.MEAN:
                way, factor = Joined.SUM, op.call.args[0]
            case _:
                return Joined.APART
        return way if grows_with_batch(self._numbers[factor.name]) else Joined.APART
