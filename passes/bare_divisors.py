"""Keeps a micro-batch's loss from being divided by 0, where that of the mini-batch is not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable

import torch

from gpipe_compiler.ir import Argument, Call, FunctionCall, Graph, MethodCall, Op, Ref
from gpipe_compiler.ir.arguments import renamed
from gpipe_compiler.ir.ops import with_arguments
from gpipe_compiler.passes.loss_divisors import guarded_sum
from gpipe_compiler.passes.loss_functions import Division
from gpipe_compiler.passes.loss_terms import Terms
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.verbs import verb


def never_by_zero(terms: Terms, divisions: Iterable[Division]) -> Graph:
    """The graph, annotated, in which these terms are divided by no less than a weight of 1 gives.

    What they divide is no 0 where nothing counts: the focal loss of images without an object, or
    what weighs more and less than 0 by turns.
    """
    graph = terms.graph
    changed: dict[str, tuple[Op, ...]] = {}
    for value, found in _dividing(graph, divisions).items():
        divisor = guarded_sum(terms, value)
        assert divisor is not None
        wishes = (f"{value}_{number}" for number in itertools.count(2))
        name = next(wish for wish in wishes if wish not in graph.values)
        least: Argument = int(divisor.factor) if divisor.factor.is_integer() else divisor.factor
        bound: tuple[Op, ...] = ()
        if verb(divisor.op) == "mean":
            number, share = f"{name}_of", f"{name}_share"
            counted = FunctionCall(torch.numel, divisor.op.call.args[:1])
            bound = (_named(found[0], number, counted),)
            call: Call = FunctionCall(operator.truediv, (least, Ref(number)))
            bound += (_named(found[0], share, call),)
            least = Ref(share)
        call = MethodCall("clamp", (Ref(value),), {"min": least})
        bound += (_named(found[0], name, call),)
        for op in found:
            divided = with_arguments(op.call, functools.partial(renamed, names={value: name}))
            changed[op.name] = (*bound, dataclasses.replace(op, call=divided))
            bound = ()
    ops = tuple(part for op in graph.ops for part in changed.get(op.name, (op,)))
    first = min(place for place, op in enumerate(graph.ops) if op.name in changed)
    made = graph.replace(ops=ops, values={})
    if all(stretch.end <= first for stretch in graph.repeats):
        made = dataclasses.replace(made, repeats=graph.repeats)
    return annotate(made, graph.batch_size, graph.precision)


def _named(like: Op, name: str, call: Call) -> Op:
    """An op that stands where another one does."""
    return dataclasses.replace(like, name=name, result=name, call=call)


def _dividing(graph: Graph, divisions: Iterable[Division]) -> dict[str, list[Op]]:
    """For each divisor, the ops that divide by it in these terms."""
    found: dict[str, dict[str, Op]] = {}
    for term in divisions:
        behind = {term.op.name, *graph.ancestors(term.op.inputs)}
        for op in graph.ops:
            if op.name in behind and verb(op) == "div" and op.call.args[1] == Ref(term.divisor):
                found.setdefault(term.divisor, {})[op.name] = op
    return {value: [*ops.values()] for value, ops in found.items()}
