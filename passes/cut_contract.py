"""Contracts a cut problem without losing any cut that could be the best.

Merged are: the nodes of a group, what would make a cycle with them, everything pinned to the last
stage, and nodes that take no time and whose move to a neighbour's stage saves no transfer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut_problem import GRAPH_INPUT, CutProblem
from gpipe_compiler.passes.disjoint import DisjointSets


@dataclass(frozen=True, slots=True)
class Movable:
    """A value, or several that always move together, in seconds on the link.

    `consumers` lists the contracted nodes other than the producer, ascending.
    """

    producer: int
    consumers: tuple[int, ...]
    receive_s: float
    gradient_s: float


@dataclass(frozen=True)
class Contracted:
    """A problem of fewer nodes, in topological order.

    Attributes:
        members: for every node, the indices of the original nodes in it.
        before: for every node, the nodes that directly precede it.
        last: whether the last node must lie in the last stage.
        last_alone: whether it may make up the last stage by itself.
    """

    members: tuple[tuple[int, ...], ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    values: tuple[Movable, ...]
    before: tuple[frozenset[int], ...]
    last: bool
    last_alone: bool

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.members)

    @property
    def parts(self) -> int:
        """The most stages that it can be cut into."""
        joined = self.last and not self.last_alone and self.size > 1
        return self.size - joined


def contract(problem: CutProblem, link: Link, *, keep: int) -> Contracted:
    """The contracted problem; merging of costless nodes stops at `keep` parts.

    Raises:
        PlanError: when the problem has a cycle of its own.
    """
    edges = sorted(set(problem.edges()))
    size = len(problem.nodes)
    own = _topological(size, (e for e in edges if e[0] != e[1]))
    if len(own) < size:
        stuck = problem.nodes[min(set(range(size)) - set(own))].name
        raise PlanError(f"the graph has a cycle, through or before {stuck}")
    owner = _merge_groups(problem, edges)
    merged = _build(problem, owner, link)
    while True:
        owner = _merge_costless(problem, merged, owner)
        lean = _build(problem, owner, link)
        if lean.size == merged.size or lean.parts < keep:
            return merged
        merged = lean


def _merge_groups(problem: CutProblem, edges: Sequence[tuple[int, int]]) -> list[int]:
    """For every node the representative of what it must share a stage with."""
    find = DisjointSets(range(len(problem.nodes)))
    for group in problem.groups:
        find.join(group)
    if problem.last:
        after: dict[int, list[int]] = {}
        for source, target in edges:
            after.setdefault(source, []).append(target)
        # Groups can pull nodes into the last stage whose followers then follow.
        pinned = set(problem.last)
        while True:
            roots = {find.leader(node) for node in _reach(pinned, after)}
            grown = {n for n in range(len(problem.nodes)) if find.leader(n) in roots}
            if grown == pinned:
                break
            pinned = grown
        find.join(sorted(pinned))
    find.close(edges)
    return [find.leader(node) for node in range(len(problem.nodes))]


def _merge_costless(problem: CutProblem, graph: Contracted, owner: Sequence[int]) -> list[int]:
    """Owners after every costless node has joined a neighbour where that loses nothing.

    A node joins the producer of its only input when nothing else reads that input and its own
    outputs are no dearer to move; it joins its only follower when its inputs are no dearer to
    move than its output. The representatives stay valid as nodes only move along edges.
    """
    find = DisjointSets(range(len(problem.nodes)))
    for node, root in enumerate(owner):
        find.join((root, node))
    after: list[set[int]] = [set() for _ in range(graph.size)]
    for node, before in enumerate(graph.before):
        for source in before:
            after[source].add(node)
    made: dict[int, list[Movable]] = {}
    read: dict[int, list[Movable]] = {}
    for value in graph.values:
        made.setdefault(value.producer, []).append(value)
        for consumer in value.consumers:
            read.setdefault(consumer, []).append(value)
    moved: set[int] = set()
    for node in range(graph.size - graph.last):
        if graph.forward_s[node] or graph.backward_s[node]:
            continue
        near = {node, *graph.before[node], *after[node]}
        if moved & near:
            continue  # one change at a time in a neighbourhood keeps the argument simple
        neighbour = _costless_neighbour(graph, node, after[node], made, read)
        if neighbour is not None:
            find.join((graph.members[neighbour][0], graph.members[node][0]))
            moved |= {node, neighbour}
    return [find.leader(node) for node in range(len(problem.nodes))]


def _costless_neighbour(
    graph: Contracted,
    node: int,
    after: set[int],
    made: Mapping[int, list[Movable]],
    read: Mapping[int, list[Movable]],
) -> int | None:
    inputs, outputs = read.get(node, []), made.get(node, [])
    taken = (sum(v.receive_s for v in inputs), sum(v.gradient_s for v in inputs))
    given = (sum(v.receive_s for v in outputs), sum(v.gradient_s for v in outputs))
    if len(graph.before[node]) == 1 and all(
        value.producer != GRAPH_INPUT and value.consumers == (node,) for value in inputs
    ):
        (source,) = graph.before[node]
        # With one follower stage the outputs move at most once where the inputs moved before.
        if given[0] <= taken[0] and given[1] <= taken[1]:
            return source
    if len(after) == 1:
        (target,) = after
        if taken[0] <= given[0] and taken[1] <= given[1]:
            return target
    return None


def _build(problem: CutProblem, owner: Sequence[int], link: Link) -> Contracted:
    """The graph whose nodes are the classes of `owner`, in a deterministic topological order."""
    roots = sorted(set(owner))
    pinned = {owner[node] for node in problem.last}
    edges = {
        (owner[source], owner[target])
        for source, target in problem.edges()
        if owner[source] != owner[target]
    }
    local = {root: index for index, root in enumerate(roots)}
    order = _topological(len(roots), ((local[s], local[t]) for s, t in edges))
    sequence = [roots[index] for index in order if roots[index] not in pinned]
    sequence.extend(sorted(pinned))
    position = {root: index for index, root in enumerate(sequence)}
    members: list[list[int]] = [[] for _ in sequence]
    for node, root in enumerate(owner):
        members[position[root]].append(node)
    before: list[set[int]] = [set() for _ in sequence]
    for source, target in edges:
        before[position[target]].add(position[source])
    moving: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
    for value in problem.values:
        producer = value.producer
        if producer != GRAPH_INPUT:
            producer = position[owner[producer]]
        consumers = tuple(sorted({position[owner[c]] for c in value.consumers} - {producer}))
        if consumers:
            key = (producer, consumers)
            receive, gradient = moving.get(key, (0.0, 0.0))
            moving[key] = (
                receive + link.seconds(value.bytes),
                gradient + link.seconds(value.gradient_bytes),
            )
    return Contracted(
        tuple(map(tuple, members)),
        tuple(sum(problem.nodes[n].forward_s for n in group) for group in members),
        tuple(sum(problem.nodes[n].backward_s for n in group) for group in members),
        tuple(
            Movable(producer, consumers, receive, gradient)
            for (producer, consumers), (receive, gradient) in sorted(moving.items())
        ),
        tuple(map(frozenset, before)),
        bool(pinned),
        problem.last_alone,
    )


def _reach(start: Iterable[int], after: Mapping[int, Sequence[int]]) -> set[int]:
    found = set(start)
    pending = list(found)
    while pending:
        for node in after.get(pending.pop(), ()):
            if node not in found:
                found.add(node)
                pending.append(node)
    return found


def _topological(size: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Nodes after all that precede them, the smallest index first; nodes on cycles left out."""
    after: list[list[int]] = [[] for _ in range(size)]
    waiting = [0] * size
    for source, target in set(edges):
        after[source].append(target)
        waiting[target] += 1
    ready = [node for node in range(size) if not waiting[node]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    return order
