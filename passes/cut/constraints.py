"""What pins, groups and pairs apart mean for every node: the first and the last stage for it; and
why there is none, where they contradict each other.

Pins bound the stages of what must lie together from both sides, data flow and pairs apart bound
them from below: such a system of differences can be met where the least solution keeps to every
upper bound. Stages that no node may lie in are seen too; that no other is empty is for the cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.disjoint import DisjointSets


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


@dataclass(frozen=True, slots=True)
class ConstraintWords:
    """How messages call the constraints of a problem; those that are left out by their nodes.

    Attributes:
        ties: why nodes share a stage that nobody has asked for.
    """

    pins: Mapping[tuple[int, int], str] = field(default_factory=dict)
    groups: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    apart: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ties: tuple[tuple[frozenset[int], str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Least:
    """The earliest stage that is possible, and the constraints that make it so."""

    stage: int = 0
    because: tuple[str, ...] = ()


class StageRanges:
    """The ranges that follow from all constraints together.

    Args:
        edges: (before, after) pairs of nodes.
        find: what must share a stage, without cycles between its sets.

    Attributes:
        faults: why no assignment to stages fulfils everything; empty where one does.
    """

    def __init__(
        self,
        problem: CutProblem,
        edges: Iterable[tuple[int, int]],
        find: DisjointSets[int],
        stages: int,
        words: ConstraintWords,
    ) -> None:
        self.problem, self.stages, self.words = problem, stages, words
        self.leader = [find.leader(node) for node in range(len(problem.nodes))]
        self.after: dict[int, set[int]] = {leader: set() for leader in sorted(set(self.leader))}
        for before, after in edges:
            if self.leader[before] != self.leader[after]:
                self.after[self.leader[before]].add(self.leader[after])
        self.pins: dict[int, tuple[int, int, str]] = {}
        self.split: dict[tuple[int, int], str] = {}
        self.faults = [*self._of_pins(), *self._of_pairs()]
        for before, after in self.split:
            self.after[before].add(after)
        sources: dict[int, list[int]] = {leader: [] for leader in self.after}
        pairs = [(source, target) for source in self.after for target in sorted(self.after[source])]
        for source, target in pairs:
            sources[target].append(source)
        order = topological(len(self.leader), pairs)
        self.order = [(leader, sources[leader]) for leader in order if leader in sources]
        self.least: dict[int, _Least] = {}
        self.faults += self._too_early()
        self.most = self._latest()
        self.faults += self._together_after_all()
        self.faults += self._empty()

    @classmethod
    def of(cls, problem: CutProblem, stages: int, words: ConstraintWords) -> StageRanges:
        """Those of a problem without cycles."""
        edges = sorted(set(problem.edges()))
        find = DisjointSets(range(len(problem.nodes)))
        for group in problem.groups:
            find.join(group)
        find.close(edges)
        return cls(problem, edges, find, stages, words)

    def ranges(self) -> Ranges:
        """The ranges, where nothing is at fault."""
        must = self.stages - 1
        closure = self._reach(self.leader[node] for node in self.problem.last)
        return Ranges(
            tuple(self.least[leader].stage for leader in self.leader),
            tuple(self.most[leader] for leader in self.leader),
            any(self.least[n].stage == must and n not in closure for n in set(self.leader)),
        )

    def _of_pins(self) -> Iterator[str]:
        for node, stage in self.problem.pinned:
            words = self.words.pins.get(
                (node, stage), f"{self._name(node)} is pinned to stage {stage}"
            )
            if not 0 <= stage < self.stages:
                yield f"{words}, but there are {self.stages} stages, counted from 0"
                continue
            other = self.pins.setdefault(self.leader[node], (node, stage, words))
            if other[1] != stage:
                yield f"{other[2]} and {words}: {self._together((other[0], node))}"

    def _of_pairs(self) -> Iterator[str]:
        """Of the pairs apart, those that the graph puts in an order are arcs as well."""
        for pair in self.problem.apart:
            one, other = (self.leader[node] for node in pair)
            if one == other:
                yield f"{self._apart(pair)}: {self._together(pair)}"
            elif other in self._reach([one]):
                self.split[one, other] = self._apart(pair)
            elif one in self._reach([other]):
                self.split[other, one] = self._apart(pair)

    def _apart(self, pair: tuple[int, int]) -> str:
        return self.words.apart.get(pair, f"{self._names(pair)} must lie in different stages")

    def _names(self, nodes: Iterable[int]) -> str:
        return " and ".join(map(self._name, nodes))

    def _name(self, node: int) -> str:
        return self.problem.nodes[node].name

    def _together(self, pair: tuple[int, int]) -> str:
        """That two nodes of a set lie in one stage, and why."""
        leader = self.leader[pair[0]]
        words = [
            words
            for group, words in self.words.groups.items()
            if group and self.leader[group[0]] == leader
        ]
        if words:
            return f"{self._names(pair)} lie in one stage, by {' and '.join(words)}"
        ties = [tie for tie in self.words.ties if self.leader[min(tie[0])] == leader]
        # Where no tie holds both, several do one after the other: one of them says how.
        ties.sort(key=lambda tie: -len(tie[0].intersection(pair)))
        why = f", {ties[0][1]}" if ties else ""
        return f"{self._names(pair)} cannot be cut apart{why}"

    def _too_early(self) -> Iterator[str]:
        """The pins that lie before what they follow from, and splits that ask for more stages."""
        last = {self.leader[node] for node in self.problem.last}
        for leader, before in self.order:
            bound = _Least()
            for source in before:
                known, words = self.least[source], self.split.get((source, leader))
                because = known.because if words is None else (*known.because, words)
                later = _Least(known.stage + (words is not None), tuple(dict.fromkeys(because)))
                bound = max(bound, later, key=lambda item: item.stage)
            if leader in last and bound.stage < self.stages - 1:
                bound = _Least(self.stages - 1, (*bound.because, "the loss being made last"))
            if leader in self.pins:
                _, stage, words = self.pins[leader]
                if stage < bound.stage:
                    yield (
                        f"{words}: some of it has to lie in stage {bound.stage} or later, by "
                        f"{', '.join(dict.fromkeys(bound.because))}"
                    )
                bound = _Least(stage, (words,))
            elif bound.stage >= self.stages:
                yield (
                    f"{', '.join(bound.because)}: {self._name(leader)} would lie in stage "
                    f"{bound.stage}, but there are {self.stages} stages"
                )
                bound = _Least()
            self.least[leader] = bound

    def _latest(self) -> dict[int, int]:
        most = dict.fromkeys(self.leader, self.stages - 1)
        most.update((leader, stage) for leader, (_, stage, _) in self.pins.items())
        for leader, before in reversed(self.order):
            for source in before:
                most[source] = min(most[source], most[leader] - ((source, leader) in self.split))
        return most

    def _together_after_all(self) -> Iterator[str]:
        """Pairs apart that all other constraints leave no more than one stage."""
        for pair in self.problem.apart if not self.faults else ():
            one, other = (self.leader[node] for node in pair)
            if (
                self.least[one].stage
                == self.most[one]
                == self.least[other].stage
                == self.most[other]
            ):
                stage = self.most[one]
                yield f"{self._apart(pair)}: {self._names(pair)} can only lie in stage {stage}"

    def _empty(self) -> Iterator[str]:
        """Stages that pins leave to no node."""
        bounds = {node: (least.stage, self.most[node]) for node, least in self.least.items()}
        for stage in range(self.stages) if self.pins and not self.faults else ():
            if not any(first <= stage <= last for first, last in bounds.values()):
                words = dict.fromkeys(words for _, _, words in self.pins.values())
                yield f"{', '.join(words)}: nothing is left for stage {stage}"

    def _reach(self, start: Iterable[int]) -> set[int]:
        found = set(start)
        pending = list(found)
        while pending:
            for node in self.after[pending.pop()]:
                if node not in found:
                    found.add(node)
                    pending.append(node)
        return found


def topological(size: int, edges: Iterable[tuple[int, int]]) -> list[int]:
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
