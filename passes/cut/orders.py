"""Ways to put the nodes of a graph in a row, and the down-sets that are places to cut it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT


def topological_orders(graph: Contracted) -> tuple[tuple[int, ...], ...]:
    """Several ways to put the nodes in a row, each once.

    As the model wrote them; breadth first; depth first (finish a branch before the next); and
    greedily so that little lies across the border.
    """
    depth = [0] * graph.size
    for node, before in enumerate(graph.before):
        depth[node] = max((depth[b] + 1 for b in before), default=0)
    height = [0] * graph.size
    for node in reversed(range(graph.size)):
        for source in graph.before[node]:
            height[source] = max(height[source], height[node] + 1)
    rows = (
        tuple(range(graph.size)),
        _listed(graph, lambda node, _: depth[node]),
        _listed(graph, lambda node, _: -height[node]),
        _listed(graph, lambda _, step: -step),
        _least_live(graph),
    )
    return tuple(dict.fromkeys(rows))


def _listed(graph: Contracted, rank: Callable[[int, int], int]) -> tuple[int, ...]:
    """The order that takes the ready node of least rank (node, step at which it became ready)."""
    after = graph.after()
    waiting = [len(before) for before in graph.before]
    last = graph.size - 1 if graph.last else -1
    ready = [(rank(n, 0), n) for n in range(graph.size) if not waiting[n] and n != last]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target] and target != last:
                heapq.heappush(ready, (rank(target, len(order)), target))
    return (*order, last) if graph.last else tuple(order)


def _least_live(graph: Contracted) -> tuple[int, ...]:
    """The order that at every step adds the node after which least has to cross the border."""
    after = graph.after()
    made: list[list[int]] = [[] for _ in range(graph.size)]
    read: list[list[int]] = [[] for _ in range(graph.size)]
    outstanding = []
    weight = []
    for index, value in enumerate(graph.values):
        outstanding.append(len(value.consumers))
        weight.append(value.bytes + value.gradient_bytes)
        if value.producer != GRAPH_INPUT:
            made[value.producer].append(index)
        for consumer in value.consumers:
            read[consumer].append(index)
    waiting = [len(before) for before in graph.before]
    last = graph.size - 1 if graph.last else -1
    ready = {n for n in range(graph.size) if not waiting[n] and n != last}
    order: list[int] = []
    while ready:

        def growth(node: int) -> tuple[float, int]:
            freed = sum(weight[v] for v in read[node] if outstanding[v] == 1)
            return sum(weight[v] for v in made[node]) - freed, node

        node = min(ready, key=growth)
        ready.remove(node)
        order.append(node)
        for value_index in read[node]:
            outstanding[value_index] -= 1
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target] and target != last:
                ready.add(target)
    return (*order, last) if graph.last else tuple(order)


def down_sets(graph: Contracted, limit: int) -> list[int] | None:
    """Every place to cut, as bit masks; None when there are more than `limit`.

    They are the sets closed under predecessors and without the pinned node, and the whole set.
    """
    free = graph.size - graph.last
    before = [sum(1 << node for node in nodes) for nodes in graph.before]
    after = graph.after()
    first = tuple(node for node in range(free) if not before[node])
    found: dict[int, tuple[int, ...]] = {0: first}
    pending = [0]
    for mask in pending:
        addable = found[mask]
        for node in addable:
            grown = mask | 1 << node
            if grown in found:
                continue
            if len(found) >= limit:
                return None
            new = (t for t in after[node] if t < free and before[t] & ~grown == 0)
            found[grown] = (*(n for n in addable if n != node), *new)
            pending.append(grown)
    whole = (1 << graph.size) - 1
    return sorted({*found, whole})


def prefixes(order: Sequence[int]) -> list[int]:
    """The down-sets of a graph linearised in this order."""
    masks = [0]
    for node in order:
        masks.append(masks[-1] | 1 << node)
    return masks


def masks_between(graph: Contracted, stage_of: Sequence[int]) -> list[int]:
    """The places between the stages of a cut, as down-sets of the graph.

    Args:
        stage_of: for every node of the problem that the graph was contracted from.
    """
    stages = [stage_of[members[0]] for members in graph.members]
    return [
        sum(1 << node for node, stage in enumerate(stages) if stage < boundary)
        for boundary in range(1, max(stages) + 1)
    ]
