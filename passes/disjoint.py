"""Disjoint sets, joined as what must stay together becomes known."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DisjointSets(Generic[T]):
    """Sets of the given members, at first one each; the leader of a set is its first member."""

    def __init__(self, members: Iterable[T]) -> None:
        self._order = {member: position for position, member in enumerate(members)}
        self._parent = {member: member for member in self._order}

    def leader(self, member: T) -> T:
        """The member that stands for the set of this one."""
        while self._parent[member] != member:
            self._parent[member] = self._parent[self._parent[member]]
            member = self._parent[member]
        return member

    def join(self, members: Iterable[T]) -> None:
        """Makes one set of the sets of all these."""
        leaders = sorted({self.leader(item) for item in members}, key=self._order.__getitem__)
        for other in leaders[1:]:
            self._parent[other] = leaders[0]

    def close(self, edges: Iterable[tuple[T, T]]) -> None:
        """Joins sets that lie on a common cycle, until the graph of sets has none."""
        successors: dict[T, set[T]] = {self.leader(member): set() for member in self._parent}
        for before, after in edges:
            first, second = self.leader(before), self.leader(after)
            if first != second:
                successors[first].add(second)
        for component in _components(successors):
            self.join(component)


def _components(successors: Mapping[T, Collection[T]]) -> Iterator[list[T]]:
    """The strongly connected components of two nodes or more (Tarjan's algorithm, iterative)."""
    index: dict[T, int] = {}
    low: dict[T, int] = {}
    on_path: dict[T, None] = {}
    for root in successors:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        on_path[root] = None
        work = [(root, iter(successors[root]))]
        while work:
            node, pending = work[-1]
            for successor in pending:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    on_path[successor] = None
                    work.append((successor, iter(successors[successor])))
                    break
                if successor in on_path:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component: list[T] = []
                    while not component or component[-1] != node:
                        component.append(on_path.popitem()[0])
                    if len(component) > 1:
                        yield component
