"""The family of down-sets along one order of the nodes, for graphs of thousands of nodes.

No table of nodes and down-sets is made: what crosses a place in a row of nodes are the few values
made before it and used after it, and stages are no longer than a good cut's longest.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.space import Booleans, Crossings, Floats, Integers, Space


class Line(Space):
    """The down-sets of a graph linearised in this order: number i holds the first i nodes."""

    cached_pairs = 6_000_000  # those of 15,000 nodes on 128 devices, which are asked for twice

    def __init__(self, graph: Contracted, order: Sequence[int]) -> None:
        self.graph, self.idle = graph, False
        self.size = graph.size + 1
        self.order = np.array(order)
        self.place = np.empty(graph.size, dtype=np.int64)
        self.place[self.order] = np.arange(graph.size)
        self.nodes: Integers = np.arange(self.size)
        least = graph.least_s[self.order]
        scale = float(least.sum()) or 1.0
        self._work = np.concatenate(([0], np.cumsum(np.rint(least / scale * 2**40)))).astype(int)
        self._scale = scale / 2**40
        self.inside = _sums(graph.with_fastest()[:, :, self.order])
        self._start_cache()
        self._values()
        self._keeps()
        together = [sorted(map(int, self.place[list(pair)])) for pair in graph.apart]
        self._apart = [(first, second) for first, second in together]
        self._alone = graph.last and not graph.last_alone

    def _values(self) -> None:
        graph = self.graph
        self._uses = [sorted(map(int, self.place[list(v.consumers)])) for v in graph.values]
        self._moving = np.array(
            [[v.sends, v.bytes, v.returns, v.gradient_bytes] for v in graph.values]
        ).reshape(-1, 4)
        self._waiting: list[list[int]] = [[] for _ in range(self.size)]
        steps = np.zeros((4, self.size + 1))
        given = np.zeros(self.size + 1)
        for index, value in enumerate(graph.values):
            first = 0 if value.producer == GRAPH_INPUT else int(self.place[value.producer])
            last = self._uses[index][-1]
            if value.producer == GRAPH_INPUT:
                given[self._uses[index][0] + 1] += value.bytes
            steps[:, first + 1] += self._moving[index]
            steps[:, last + 1] -= self._moving[index]
            for start in range(first + 1, last + 1):
                self._waiting[start].append(index)
        self._crossing: Floats = np.cumsum(steps, axis=1)[:, :-1]
        self._given = np.cumsum(given)[:-1]

    def _keeps(self) -> None:
        kept = self.graph.kept
        self._users = [sorted(map(int, self.place[list(k.users)])) for k in kept]
        self._sizes = np.array(
            [[k.bytes, k.microbatch_bytes, k.updated_bytes] for k in kept], dtype=np.float64
        ).reshape(-1, 3)
        self._halved: list[list[int]] = [[] for _ in range(self.size)]
        touched = np.zeros((3, self.size + 1))
        for index, users in enumerate(self._users):
            touched[:, users[0] + 1] += self._sizes[index]
            for start in range(users[0] + 1, users[-1] + 1):
                self._halved[start].append(index)
        self._touched = np.cumsum(touched, axis=1)[:, :-1]

    def ends(self, start: int) -> Integers:
        """See `Space`."""
        stop = self._stop(start)
        for first, second in self._apart:
            if first >= start:
                stop = min(stop, second + 1)
        ends = np.arange(start + 1, max(stop, start + 1))
        return ends[ends != self.graph.size - 1] if self._alone else ends

    def _cross(self, start: int) -> Crossings:
        ends = self.ends(start)
        width = int(ends[-1]) - start if len(ends) else 0
        steps = np.zeros((4, width + 1))
        passing = np.zeros((4, width + 1))
        for index in self._waiting[start]:
            uses = self._uses[index]
            after = uses[bisect.bisect_left(uses, start)] - start
            steps[:, min(after, width)] += self._moving[index]
            passing[:, 0] += self._moving[index]
            passing[:, min(uses[-1] - start, width)] -= self._moving[index]
        held_steps = np.zeros((3, width + 1))
        for index in self._halved[start]:
            users = self._users[index]
            after = users[bisect.bisect_left(users, start)] - start
            held_steps[:, min(after, width)] += self._sizes[index]
        at = ends - start - 1
        crossed = np.cumsum(steps, axis=1)[:, at]
        passed = np.cumsum(passing, axis=1)[:, at]
        held = self._touched[:, ends] - self._touched[:, [start]]
        held = held + np.cumsum(held_steps, axis=1)[:, at]
        taken = crossed[1] if start else crossed[1] + self._given[ends]
        sent = self._crossing[:, ends] - passed
        return Crossings(ends, crossed, sent, np.stack((held[0], taken, held[1])), held[2])

    def largest(self, cost: Floats) -> Floats:
        """See `Space`."""
        return np.maximum.accumulate(np.concatenate(([0.0], cost[self.order])))

    def allowed(self, boundary: int) -> Booleans:
        """See `Space`."""
        known = self._allowed.get(boundary)
        if known is None:
            first = np.array(self.graph.first_stage)[self.order] >= boundary
            last = np.array(self.graph.last_stage)[self.order] < boundary
            begin = int(np.flatnonzero(last)[-1]) + 1 if last.any() else 0
            end = int(np.flatnonzero(first)[0]) if first.any() else self.graph.size
            known = (self.nodes >= begin) & (self.nodes <= end)
            self._allowed[boundary] = known
        return known

    def stages_of(self, chain: Sequence[int]) -> Integers:
        """See `Space`."""
        return np.searchsorted(np.array(chain[1:]), self.place, side="right")


def _sums(rows: Floats) -> Floats:
    nothing = np.zeros((*rows.shape[:2], 1))
    return np.concatenate((nothing, np.cumsum(rows, axis=2)), axis=2)
