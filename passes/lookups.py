"""What look-ups by position, as of learned positions, demand of the sizes that are free."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

from torch import nn

from gpipe_compiler.ir import Graph, ModuleCall, Op, Ref, StateRef, called
from gpipe_compiler.ir.sizes import UNKNOWN_LINE, is_free
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.positions import Cases, Positions
from gpipe_compiler.passes.positions.coordinates import Affine
from gpipe_compiler.runtime.sizes import Dim, Relation, Requirement


def within_tables(graph: Graph) -> Iterator[Requirement]:
    """That positions which follow from sizes lie within the tables in which they are looked up.

    torch checks indices when it has their values, on a GPU after the step.
    """
    positions = Positions(graph, effects(graph))
    for op in graph.ops:
        found = _lookup(graph, op)
        element = None if found is None else positions.element(Ref(found[0]))
        if found is None or not isinstance(element, Cases):
            continue
        index, rows = found
        for _, affine in element.cases:
            count = _count(affine, graph.values[index].dims)
            if is_free(count):
                where = op.source.brief if op.source is not None else UNKNOWN_LINE
                yield Requirement(count, Relation.AT_MOST, rows, where)


def _count(affine: Affine, dims: Sequence[Dim]) -> Dim:
    """How many rows a table has to have for indices up to the largest."""
    grows = [
        (weight, size) for weight, size in zip(affine.weights, dims, strict=True) if weight > 0
    ]
    rest = int(affine.offset) + 1 - sum(weight for weight, _ in grows)
    terms = [size if weight == 1 else size * weight for weight, size in grows]
    return functools.reduce(operator.add, [*terms, rest] if rest or not terms else terms)


def _lookup(graph: Graph, op: Op) -> tuple[str, int] | None:
    """The value of the indices of a look-up, and the rows of its table."""
    call = op.call
    if isinstance(call, ModuleCall):
        spec = graph.modules[call.module]
        if spec.cls is nn.Embedding and call.args and isinstance(call.args[0], Ref):
            return call.args[0].name, graph.state[spec.state["weight"]].shape[0]
        return None
    match called(call), call.args:
        case ("embedding", (Ref(name=index), StateRef(name=table), *_)):
            return index, graph.state[table].shape[0]
        case ("getitem", (StateRef(name=table), Ref(name=index))):
            return index, graph.state[table].shape[0]
        case _:
            return None
