"""Places to cut graphs that have too many to look at all of them.

Down-sets along several topological orders, close to one another where asked, and what one move
tells from a given one.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.cluster import NO_LINK
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.orders import topological_orders
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.space import Booleans, Integers, bits

NEAREST = 2
"""Moves out of a down-set, with a little more and a little less work, beside each one into it."""


WHOLE = 2**40
"""The computing of the whole graph, in the whole numbers that are counted with: sums are exact."""

MOST_COST = 8 * WHOLE
"""What crosses for longer than that is in no cut worth a thought."""

MOVES = 300
"""Moves in and out of a down-set that are tried."""


@dataclass(frozen=True)
class OrderPrefixes:
    """The prefixes of one topological order; entry i is for the first i nodes.

    Attributes:
        work: computing inside, in shares of `WHOLE`.
        crossing: to move what is made inside and used outside, and its gradients back; likewise.
    """

    order: tuple[int, ...]
    work: Integers
    crossing: Integers

    @classmethod
    def of(
        cls, graph: Contracted, order: tuple[int, ...], units: Integers, cost: Integers
    ) -> OrderPrefixes:
        """The row of an order.

        Args:
            units: the work of every node.
            cost: of every value that crosses a border.
        """
        work = np.concatenate(([0], np.cumsum(units[list(order)])))
        place = {node: index for index, node in enumerate(order)}
        steps = np.zeros(len(order) + 2, dtype=np.int64)
        for value, each in zip(graph.values, cost.tolist(), strict=True):
            first = 0 if value.producer == GRAPH_INPUT else place[value.producer]
            steps[first + 1] += each
            steps[max(place[user] for user in value.consumers) + 1] -= each
        return cls(order, work, np.cumsum(steps)[:-1])

    def between(self, low: float, high: float, most: int) -> Integers:
        """At most `count` prefixes with work from `low` to `high`.

        Where there are more, of those with about the same work the one that crosses least stands
        for all.
        """
        first, last = np.searchsorted(self.work, (low, high), side="left")
        found = np.arange(max(1, first), min(last + 1, len(self.order)))
        if len(found) <= most:
            return found
        window = (self.work[found] - self.work[found[0]]) * most
        window //= self.work[found[-1]] - self.work[found[0]] + 1
        order = np.lexsort((found, self.crossing[found], window))
        begins = np.flatnonzero(np.diff(window[order], prepend=-1))
        return np.sort(found[order[begins]])

    def masks(self, chosen: Iterable[int]) -> Iterable[int]:
        """These prefixes, which ascend, as bit masks."""
        mask, begin = 0, 0
        for end in chosen:
            for node in self.order[begin:end]:
                mask |= 1 << node
            begin = end
            yield mask


@dataclass(frozen=True)
class Places:
    """The prefixes of several topological orders."""

    graph: Contracted
    rows: tuple[OrderPrefixes, ...]
    _after: list[list[int]]
    _edges: tuple[Integers, Integers]
    """The nodes before and after every edge."""
    _units: Integers
    _cost: Integers
    _ends: Integers
    """The nodes that make and read the values, value after value; `_first`: where each begins."""
    _first: Integers

    @classmethod
    def of(cls, graph: Contracted, device_order: DeviceOrder) -> Places:
        """Those of a graph.

        Args:
            device_order: whose links count, the fastest of them.
        """
        links = {rate.receives for rate in device_order.rates[1:]} or {NO_LINK}
        cost_s = [min(v.receive_s(k) + v.gradient_s(k) for k in links) for v in graph.values]
        least = graph.least_s
        unit = WHOLE / (float(least.sum()) or 1.0)
        units = np.rint(least * unit).astype(np.int64)
        cost = np.rint(np.minimum(np.array(cost_s) * unit, MOST_COST)).astype(np.int64)
        orders = topological_orders(graph)
        rows = tuple(OrderPrefixes.of(graph, order, units, cost) for order in orders)
        edges = [(source, node) for node, before in enumerate(graph.before) for source in before]
        sources, targets = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        ends = [[n for n in (v.producer, *v.consumers) if n != GRAPH_INPUT] for v in graph.values]
        first = np.cumsum([0, *map(len, ends)])[:-1]
        flat = np.array(list(itertools.chain.from_iterable(ends)), dtype=np.int64)
        return cls(graph, rows, graph.after(), (sources, targets), units, cost, flat, first)

    def everywhere(self, most: int) -> set[int]:
        """This number of all of them, as bit masks."""
        return self._about([WHOLE / 2], 1.0, most)

    def near(self, masks: Sequence[int], share: float, most: int) -> set[int]:
        """This number of those that hold about as much work as one of these down-sets.

        Args:
            share: of all work, how wide the ranges are about those of the masks.
        """
        return self._about(self._work(masks), share, most)

    def beside(self, masks: Sequence[int], most: int) -> set[int]:
        """Down-sets that are one move away from one of these (`_neighbours`), this many.

        Those that cross least, a difference in work counting as much as crossing.
        """
        found: set[int] = set()
        each = max(1, most // max(1, len(masks)))
        for mask in masks:
            near = sorted(self._neighbours(mask))
            if len(near) > each:
                moved = [mask ^ other for other in near]
                fewest = sorted(range(len(near)), key=lambda index: moved[index].bit_count())
                chosen = np.argsort(self._merit(moved, mask), kind="stable")[: each // 2]
                near = [near[index] for index in (*chosen.tolist(), *fewest[: each // 2])]
            found.update(near)
        return found

    def _neighbours(self, mask: int) -> set[int]:
        """Down-sets that a node, with all that has to move with it, tells from a given one.

        And those where one goes in and another, with about as much work, comes out. Of moves in
        either direction there are at most `MOVES`, those of the fewest nodes.
        """
        graph = self.graph
        inside = bits([mask], graph.size)[0]
        outside = ~inside
        outside[graph.size - graph.last :] = False
        sources, targets = self._edges
        into = list(_moves(outside, graph.before, self._after, (sources, targets)))
        back = _moves(inside, self._after, graph.before, (targets, sources))
        out = [nodes for nodes, _ in back]
        found = {mask ^ nodes for nodes in out}
        work_out, work_in = self._work(out), self._work([nodes for nodes, _ in into])
        lighter = sorted(zip(work_out, range(len(out)), strict=True))
        for (nodes, needed), work in zip(into, work_in, strict=True):
            grown = mask | nodes
            found.add(grown)
            at = bisect.bisect(lighter, (work, 0))
            for _, index in lighter[max(0, at - NEAREST) : at + NEAREST]:
                if not needed & out[index]:
                    found.add(grown ^ out[index])
        return found

    def _work(self, sets: Sequence[int]) -> list[int]:
        """Of sets of nodes, the computing in each, in shares of `WHOLE`."""
        nodes, member = _columns(sets)
        work: list[int] = (member.astype(np.int64) @ self._units[nodes]).tolist()
        return work

    def _merit(self, moved: Sequence[int], mask: int) -> Integers:
        """How much down-sets cross and differ in work: the less the better.

        What is the same for all does not count.

        Args:
            moved: the nodes that tell each of them from the down-set `mask`.
        """
        graph = self.graph
        nodes, moves = _columns(moved)
        before = bits([mask], graph.size)[0]
        merit = np.abs(moves @ np.where(before[nodes], -self._units[nodes], self._units[nodes]))
        column = np.full(graph.size, -1)
        column[nodes] = np.arange(len(nodes))
        crosses = np.logical_or.reduceat(column[self._ends] >= 0, self._first)
        for index in np.flatnonzero(crosses):
            value = graph.values[index]

            def member(node: int) -> Booleans:
                at = column[node]
                return np.asarray(before[node] ^ moves[:, at] if at >= 0 else before[node])

            made = True if value.producer == GRAPH_INPUT else member(value.producer)
            users = list(value.consumers)
            stay = [user for user in users if column[user] < 0]
            inside = before[stay].all()
            for user in users:
                if column[user] >= 0:
                    inside = inside & member(user)
            merit += self._cost[index] * (made & ~inside)
        return np.asarray(merit)

    def _about(self, middles: Sequence[float], share: float, most: int) -> set[int]:
        found: set[int] = set()
        each = max(2, most // (len(self.rows) * max(1, len(middles))))
        half = share * WHOLE / 2
        for row in self.rows:
            chosen: set[int] = set()
            for middle in middles:
                chosen.update(row.between(middle - half, middle + half, each).tolist())
            found.update(row.masks(sorted(chosen)))
        return found


def _columns(sets: Sequence[int]) -> tuple[Integers, Booleans]:
    """The nodes that lie in any of these sets; whether each set holds them: (sets, nodes)."""
    together = functools.reduce(operator.or_, sets, 0)
    if not together:
        return np.zeros(0, dtype=np.int64), np.zeros((len(sets), 0), dtype=np.bool_)
    low = (together & -together).bit_length() - 1
    member = bits([nodes >> low for nodes in sets], together.bit_length() - low)
    held = np.flatnonzero(member.any(axis=0))
    return held + low, member[:, held]


def _moves(
    movable: Booleans,
    needs: Sequence[Collection[int]],
    needed: Sequence[Collection[int]],
    edges: tuple[Integers, Integers],
) -> Iterator[tuple[int, int]]:
    """Nodes with all of the movable ones that they need, and all that these need, as bit masks.

    The `MOVES` smallest sets, the smallest first.

    Args:
        movable: which nodes are.
        needs: of every node, those that must move before it; `needed`: the other way round.
        edges: the same, as the first and the second node of all pairs.
    """
    first, second = edges
    missing = np.bincount(second[movable[first]], minlength=len(movable))
    sets: dict[int, tuple[int, int]] = {}

    def ready_with(node: int) -> tuple[int, int, int, int]:
        nodes, needing = 1 << node, 0
        for other in needs[node]:
            needing |= 1 << other
            if other in sets:
                nodes |= sets[other][0]
                needing |= sets[other][1]
        return nodes.bit_count(), node, nodes, needing

    ready = [ready_with(node) for node in np.flatnonzero(movable & (missing == 0)).tolist()]
    heapq.heapify(ready)
    while ready and len(sets) < MOVES:
        _, node, nodes, needing = heapq.heappop(ready)
        sets[node] = nodes, needing
        yield nodes, needing
        for other in needed[node]:
            if movable[other]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, ready_with(other))
