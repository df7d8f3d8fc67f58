"""Copies the inputs that a model writes to, so that the rest of the graph writes only its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

from gpipe_compiler.ir import Argument, Call, Graph, MethodCall, Op, Ref, RegionCall
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.passes.effects import Effects


def written_inputs(graph: Graph, effects: Effects) -> tuple[str, ...]:
    """The inputs of the graph that some op writes in place."""
    return tuple(s.name for s in graph.inputs if s.name in effects.written_values)


def own_inputs(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with these inputs copied first; ops and outputs mean the copies.

    A stage must not write to what it was given: the memory is the caller's or another stage's, and
    other stages would be given what it held before. A copy is a value like any other, which goes
    to later stages, and to the caller, with what was written.

    Args:
        names: inputs of the graph.
    """
    taken = {source.name for source in graph.inputs}
    taken.update(name for op in graph.ops for name in (op.name, *op.outputs))
    copies: dict[str, str] = {}
    for name in names:
        wishes = (f"{name}_{number}" for number in itertools.count(1))
        copies[name] = next(wish for wish in wishes if wish not in taken)
        taken.add(copies[name])

    def copied(leaf: Any) -> Argument:
        return Ref(copies.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    first = [Op(copy, MethodCall("clone", (Ref(name),)), copy) for name, copy in copies.items()]
    ops = (dataclasses.replace(op, call=_with_arguments(op.call, copied)) for op in graph.ops)
    return graph.replace(ops=(*first, *ops), outputs=map_argument(copied, graph.outputs), values={})


def _with_arguments(call: Call, function: Callable[[Any], Argument]) -> Call:
    """The call with its arguments mapped; the body of a region has names of its own."""
    args = map_argument(function, call.args)
    if isinstance(call, RegionCall):
        return dataclasses.replace(call, args=args)
    return dataclasses.replace(call, args=args, kwargs=map_argument(function, dict(call.kwargs)))
