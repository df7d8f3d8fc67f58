"""Contracts a cut problem: what must share a stage becomes one node.

That loses nothing: it merges the nodes of a group, what would make a cycle with them, and what the
constraints put into one and the same stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut.constraints import (
    ConstraintWords,
    Ranges,
    StageRanges,
    topological,
)
from gpipe_compiler.passes.cut.problem import (
    GRAPH_INPUT,
    CutProblem,
    Node,
    Resident,
    Seconds,
    Traffic,
)
from gpipe_compiler.passes.disjoint import DisjointSets


@dataclass(frozen=True, slots=True)
class Movable:
    """A value, or several that always move together.

    `consumers` lists the contracted nodes other than the producer, ascending.

    Attributes:
        sends, bytes: how many values of any size move forward, and their bytes.
        returns, gradient_bytes: how many gradients come back, and their bytes.
    """

    producer: int
    consumers: tuple[int, ...]
    sends: int
    bytes: float
    returns: int = 0
    gradient_bytes: float = 0

    @property
    def shared(self) -> bool:
        """Whether several stages may receive it."""
        return len(self.consumers) > 1

    def receive_s(self, link: Link) -> float:
        return self.sends * link.latency_s + self.bytes / link.bandwidth

    def gradient_s(self, link: Link) -> float:
        return self.returns * link.latency_s + self.gradient_bytes / link.bandwidth


@dataclass(frozen=True)
class Contracted:
    """A problem of fewer nodes, in topological order.

    Attributes:
        members: for every node, the indices of the original nodes in it.
        seconds: forward, backward, and the weights' part of backward of every node on every kind
            of device; shape (kinds, 3, nodes).
        before: for every node, the nodes that directly precede it.
        kept: what the nodes keep in memory.
        first_stage, last_stage: of every node, as the constraints allow.
        apart: pairs of nodes that must lie in different stages.
        last: whether the last node must lie in the last stage.
        last_alone: whether it may make up the last stage by itself.
    """

    members: tuple[tuple[int, ...], ...]
    seconds: npt.NDArray[np.float64]
    values: tuple[Movable, ...]
    before: tuple[frozenset[int], ...]
    kept: tuple[Resident, ...]
    first_stage: tuple[int, ...]
    last_stage: tuple[int, ...]
    apart: tuple[tuple[int, int], ...]
    last: bool
    last_alone: bool

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def parts(self) -> int:
        """The most stages that it can be cut into."""
        joined = self.last and not self.last_alone and self.size > 1
        return self.size - joined

    @property
    def least_s(self) -> npt.NDArray[np.float64]:
        """Forward and backward of every node on the kind of device that is fastest at it."""
        return np.asarray((self.seconds[:, 0] + self.seconds[:, 1]).min(axis=0))

    def with_fastest(self) -> npt.NDArray[np.float64]:
        """`seconds`, and one kind more that is as fast as the fastest at every node."""
        seconds = self.seconds
        rest = (seconds[:, 1] - seconds[:, 2]).min(axis=0)
        weight = seconds[:, 2].min(axis=0)
        best = np.stack((seconds[:, 0].min(axis=0), rest + weight, weight))
        return np.concatenate((seconds, best[None]))

    def after(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.size)]
        for node, before in enumerate(self.before):
            for source in before:
                found[source].append(node)
        return found


def contract(problem: CutProblem, stages: int) -> Contracted:
    """The problem with one node for all that must share a stage.

    Raises:
        PlanError: when the problem has a cycle of its own, or its constraints contradict each
            other, naming the nodes.
    """
    edges = sorted(set(problem.edges()))
    size = len(problem.nodes)
    order = topological(size, (e for e in edges if e[0] != e[1]))
    if len(order) < size:
        stuck = problem.nodes[min(set(range(size)) - set(order))].name
        raise PlanError(f"the graph has a cycle, through or before {stuck}")
    find = DisjointSets(range(size))
    for group in problem.groups:
        find.join(group)
    find.close(edges)
    known = StageRanges(problem, edges, find, stages, ConstraintWords())
    if known.faults:
        raise PlanError(known.faults[0], hint="data only flows forward: drop a constraint")
    ranges = known.ranges()
    for stage in range(stages):
        find.join(n for n in range(size) if ranges.first[n] == ranges.last[n] == stage)
    return _build(problem, [find.leader(node) for node in range(size)], ranges, stages)


def _build(problem: CutProblem, owner: Sequence[int], ranges: Ranges, stages: int) -> Contracted:
    """The graph whose nodes are the classes of `owner`, in a deterministic topological order."""
    roots = sorted(set(owner))
    pinned = {owner[n] for n, first in enumerate(ranges.first) if first == stages - 1}
    pairs = {(owner[source], owner[target]) for source, target in problem.edges()}
    edges = [(source, target) for source, target in pairs if source != target]
    local = {root: index for index, root in enumerate(roots)}
    order = topological(len(roots), ((local[s], local[t]) for s, t in edges))
    sequence = [roots[index] for index in order if roots[index] not in pinned]
    sequence.extend(sorted(pinned))
    position = {root: index for index, root in enumerate(sequence)}
    place = [position[root] for root in owner]
    members: list[list[int]] = [[] for _ in sequence]
    first, last = [0] * len(sequence), [stages - 1] * len(sequence)
    for node, target in enumerate(place):
        members[target].append(node)
        first[target] = max(first[target], ranges.first[node])
        last[target] = min(last[target], ranges.last[node])
    before: list[set[int]] = [set() for _ in sequence]
    for source, target in edges:
        before[position[target]].add(position[source])
    kinds: list[Sequence[Node | Seconds]] = [problem.nodes, *problem.other_kinds]
    seconds = np.zeros((len(kinds), 3, len(sequence)))
    for kind, costs in enumerate(kinds):
        for cost, target in zip(costs, place, strict=True):
            seconds[kind, :, target] += (cost.forward_s, cost.backward_s, cost.weight_s)
    return Contracted(
        tuple(map(tuple, members)),
        seconds,
        _together(problem.values, place),
        tuple(map(frozenset, before)),
        _kept_together(problem.kept, place),
        tuple(first),
        tuple(last),
        tuple(sorted({(min(p), max(p)) for a, b in problem.apart for p in [(place[a], place[b])]})),
        bool(pinned),
        problem.last_alone or stages == 1 or ranges.beside_last,
    )


def _together(values: Sequence[Traffic], place: Sequence[int]) -> tuple[Movable, ...]:
    """The values between the nodes at these places; those that always move together as one."""
    moving: dict[tuple[int, tuple[int, ...]], list[Traffic]] = {}
    for value in values:
        producer = GRAPH_INPUT if value.producer == GRAPH_INPUT else place[value.producer]
        consumers = tuple(sorted({place[c] for c in value.consumers} - {producer}))
        if consumers and (value.bytes or value.gradient_bytes):
            moving.setdefault((producer, consumers), []).append(value)
    return tuple(
        Movable(
            producer,
            consumers,
            sum(v.bytes > 0 for v in group),
            sum(v.bytes for v in group),
            sum(v.gradient_bytes > 0 for v in group),
            sum(v.gradient_bytes for v in group),
        )
        for (producer, consumers), group in sorted(moving.items())
    )


def _kept_together(kept: Sequence[Resident], place: Sequence[int]) -> tuple[Resident, ...]:
    groups: dict[tuple[int, ...], list[Resident]] = {}
    for one in kept:
        if one.users and (one.bytes or one.microbatch_bytes or one.updated_bytes):
            groups.setdefault(tuple(sorted({place[n] for n in one.users})), []).append(one)
    return tuple(
        Resident(
            users,
            sum(k.bytes for k in group),
            sum(k.microbatch_bytes for k in group),
            sum(k.updated_bytes for k in group),
        )
        for users, group in sorted(groups.items())
    )


def relevant(problem: CutProblem, *, memory: bool, updates: bool) -> CutProblem:
    """The problem without what is kept, or updated, where neither matters."""
    if memory and updates:
        return problem
    return replace(
        problem,
        kept=tuple(
            replace(
                kept,
                bytes=kept.bytes if memory else 0,
                microbatch_bytes=kept.microbatch_bytes if memory else 0,
                updated_bytes=kept.updated_bytes if updates else 0,
            )
            for kept in problem.kept
            if memory or kept.updated_bytes
        ),
    )
