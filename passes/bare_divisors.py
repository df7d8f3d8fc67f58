"""Keeps a micro-batch's loss from being divided by 0, where that of the mini-batch is not.

What is divided is no 0 where nothing counts: the focal loss of images without an object, or what
weighs more and less than 0 by turns. So the terms of parts of a batch are divided by no less than a
weight of 1 gives, and that of the batch by its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from gpipe_compiler.ir import Argument, Call, FunctionCall, Graph, MethodCall, Op, Ref
from gpipe_compiler.ir.arguments import renamed
from gpipe_compiler.ir.ops import map_result, with_arguments
from gpipe_compiler.passes.loss_divisors import Divisor, guarded_sum
from gpipe_compiler.passes.loss_functions import Division, Summand
from gpipe_compiler.passes.loss_terms import Terms
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.split_loss import TermGroup
from gpipe_compiler.passes.verbs import verb, writes


def bare_terms(groups: Iterable[TermGroup]) -> list[Summand]:
    """The terms whose divisors may be 0 in a part of a batch in which they are not."""
    return [
        summand
        for group in groups
        if group.weight is not None and group.weight.least > -math.inf
        for summand in group.summands
        if isinstance(summand.term, Division)
    ]


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
    return made, [_with_values(group, values) for group in groups]


def _with_values(group: TermGroup, values: Mapping[str, str]) -> TermGroup:
    if group.weight is None or group.weight.least == -math.inf:
        return group
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
