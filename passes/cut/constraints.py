"""What pins, groups and pairs apart mean for every node: the first and the last stage for it.

Where they contradict each other, the error names the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpipe_compiler.disjoint import DisjointSets
from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut.problem import CutProblem


@dataclass(frozen=True, slots=True)
class Ranges:
    """The stages that every node may lie in.

    Attributes:
        first, last: of every node, both inclusive.
        beside_last: whether a constraint puts a node into the last stage that need not lie there
            for the sake of `CutProblem.last`.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    beside_last: bool


def stage_ranges(
    problem: CutProblem,
    edges: Sequence[tuple[int, int]],
    order: Sequence[int],
    find: DisjointSets[int],
    stages: int,
) -> Ranges:
    """The ranges that follow from all constraints together.

    Args:
        edges: (before, after) pairs of nodes.
        order: the nodes in topological order.
        find: what must share a stage, without cycles between its sets.

    Raises:
        PlanError: when a node has no stage left.
    """
    return _Ranges(problem, edges, order, find, stages).found()


class _Ranges:
    """Works on the sets of nodes that share a stage, by their leaders."""

    def __init__(
        self,
        problem: CutProblem,
        edges: Sequence[tuple[int, int]],
        order: Sequence[int],
        find: DisjointSets[int],
        stages: int,
    ) -> None:
        self.problem, self.find, self.stages = problem, find, stages
        self.leader = [find.leader(node) for node in range(len(problem.nodes))]
        self.after: dict[int, set[int]] = {leader: set() for leader in self.leader}
        for before, after in edges:
            if self.leader[before] != self.leader[after]:
                self.after[self.leader[before]].add(self.leader[after])
        self.order = self._sorted()
        self.first = dict.fromkeys(self.after, 0)
        self.last = dict.fromkeys(self.after, stages - 1)
        self.first_why: dict[int, str] = {}
        self.last_why: dict[int, str] = {}

    def found(self) -> Ranges:
        closure = self._reach(self.leader[node] for node in self.problem.last)
        for node in sorted(self.problem.last):
            self._pin(node, self.stages - 1, "must lie in the last stage")
        for node, stage in self.problem.pinned:
            if not 0 <= stage < self.stages:
                raise PlanError(
                    f"{self._name(node)} is pinned to stage {stage}, but there are "
                    f"{self.stages} stages, counted from 0",
                )
            self._pin(node, stage, f"is pinned to stage {stage}")
        ordered = self._ordered_pairs()
        self._forward(ordered)
        self._backward(ordered)
        for leader in self.order:
            if self.first[leader] > self.last[leader]:
                self._contradiction(leader)
        for before, after in self.problem.apart:
            one, other = self.leader[before], self.leader[after]
            fixed = self.first[one] == self.last[one] == self.first[other] == self.last[other]
            if one == other or fixed:
                raise PlanError(
                    f"{self._name(before)} and {self._name(after)} must lie in different stages, "
                    "but other constraints put them into one"
                )
        must = self.stages - 1
        beside = any(self.first[n] == must and n not in closure for n in self.order)
        return Ranges(
            tuple(self.first[leader] for leader in self.leader),
            tuple(self.last[leader] for leader in self.leader),
            beside,
        )

    def _name(self, node: int) -> str:
        return self.problem.nodes[node].name

    def _pin(self, node: int, stage: int, why: str) -> None:
        leader = self.leader[node]
        text = f"{self._name(node)} {why}"
        if self.first[leader] > stage or self.last[leader] < stage:
            other = self.first_why.get(leader, "") or self.last_why.get(leader, "")
            raise PlanError(f"{text}, but {other}, and they must share a stage")
        if stage > self.first[leader] or leader not in self.first_why:
            self.first[leader], self.first_why[leader] = stage, text
        if stage < self.last[leader] or leader not in self.last_why:
            self.last[leader], self.last_why[leader] = stage, text

    def _ordered_pairs(self) -> dict[int, set[int]]:
        """Of the pairs apart, those that the graph puts in an order: for each, what follows it."""
        found: dict[int, set[int]] = {}
        for pair in self.problem.apart:
            one, other = (self.leader[node] for node in pair)
            if one == other:
                continue  # said later, with names
            if other in self._reach([one]):
                found.setdefault(one, set()).add(other)
            elif one in self._reach([other]):
                found.setdefault(other, set()).add(one)
        return found

    def _forward(self, ordered: dict[int, set[int]]) -> None:
        for leader in self.order:
            for target in self.after[leader]:
                self._raise(target, self.first[leader], leader)
            for target in ordered.get(leader, ()):
                self._raise(target, self.first[leader] + 1, leader)

    def _raise(self, target: int, stage: int, source: int) -> None:
        if stage > self.first[target]:
            self.first[target] = stage
            why = self.first_why.get(source, f"{self._name(source)} lies in a stage before")
            self.first_why[target] = why

    def _backward(self, ordered: dict[int, set[int]]) -> None:
        for leader in reversed(self.order):
            for target in self.after[leader]:
                self._lower(leader, self.last[target], target)
            for target in ordered.get(leader, ()):
                self._lower(leader, self.last[target] - 1, target)

    def _lower(self, source: int, stage: int, target: int) -> None:
        if stage < self.last[source]:
            self.last[source] = stage
            why = self.last_why.get(target, f"{self._name(target)} lies in a stage after")
            self.last_why[source] = why

    def _contradiction(self, leader: int) -> None:
        first = self.first_why.get(leader, "")
        last = self.last_why.get(leader, "")
        reasons = ", but ".join(dict.fromkeys(filter(None, (first, last))))
        raise PlanError(
            f"no stage is left for {self._name(leader)}: {reasons}; it would have to lie in stage "
            f"{self.first[leader]} or later, and in stage {self.last[leader]} or earlier",
            hint="data only flows forward: drop a pin, or ask for more stages",
        )

    def _reach(self, start: Iterable[int]) -> set[int]:
        found = set(start)
        pending = list(found)
        while pending:
            for node in self.after[pending.pop()]:
                if node not in found:
                    found.add(node)
                    pending.append(node)
        return found

    def _sorted(self) -> list[int]:
        """The leaders, each after what precedes it."""
        waiting = dict.fromkeys(self.after, 0)
        for targets in self.after.values():
            for target in targets:
                waiting[target] += 1
        ready = [leader for leader, count in waiting.items() if not count]
        for leader in ready:
            for target in sorted(self.after[leader]):
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
        return ready
