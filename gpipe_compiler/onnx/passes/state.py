"""Which nodes share a stage so that it holds a state of the model between calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.atoms import Tie
from gpipe_compiler.passes.cost import Costs


def state_ties(graph: Graph, costs: Costs, state: Mapping[str, str], most: float) -> Iterator[Tie]:
    """Of each state, the nodes that take it and the one that makes the next.

    One that the model takes at its beginning and makes at its end would tie all of it together: it
    goes along with the calls.

    Args:
        state: inputs, each with the output that it becomes.
        most: the share of the work that nodes may have which are tied together, with those between.
    """
    work = {name: cost.forward_s for name, cost in costs.ops.items()}
    whole = sum(work.values())
    for past, present in state.items():
        takers = {op.name for op in graph.consumers.get(past, ())}
        maker = graph.producer.get(present)
        if maker is None or not takers:
            continue
        between = _behind(graph, past) & graph.ancestors([present]) | takers
        if sum(work[name] for name in between) <= most * whole:
            ops = frozenset({*takers, maker.name})
            yield Tie(ops, maker.name, f"they hold the state {past} between calls")


def _behind(graph: Graph, value: str) -> set[str]:
    """The ops that follow from a value."""
    follows, found = {value}, set()
    for op in graph.ops:
        if not follows.isdisjoint(op.inputs):
            found.add(op.name)
            follows.update(op.outputs)
    return found
