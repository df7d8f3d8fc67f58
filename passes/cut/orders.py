"""Places to cut graphs that have too many to look at all of them.

Down-sets along several topological orders, close to one another where asked, and what one move
tells from a given one.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.cluster import NO_LINK
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.space import Integers, bits

NEAREST = 2
"""Moves out of a down-set, with a little more and a little less work, beside each one into it."""


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
        ends = [[n for n in (v.producer, *v.consumers) if n != GRAPH_INPUT] for v in graph.values]
        first = np.cumsum([0, *map(len, ends)])[:-1]
        flat = np.array(list(itertools.chain.from_iterable(ends)), dtype=np.int64)
        return cls(graph, rows, graph.after(), units, cost, flat, first)

    def everywhere(self, most: int) -> set[int]:
        """This number of all of them, as bit masks."""
        return self._about([WHOLE / 2], 1.0, most)

    def near(self, masks: Sequence[int], share: float, most: int) -> set[int]:
        """This number of those that hold about as much work as one of these down-sets.

        Args:
            share: of all work, how wide the ranges are about those of the masks.
        """
        work = self._members(masks) @ self._units
        return self._about(work.tolist(), share, most)

    def beside(self, masks: Sequence[int], most: int) -> set[int]:
        """Down-sets that are one move away from one of these (`_neighbours`), this many.

        Those that cross least, a difference in work counting as much as crossing.
        """
        found: set[int] = set()
        each = max(1, most // max(1, len(masks)))
        for mask in masks:
            near = sorted(self._neighbours(mask))
            if len(near) > each:
                least = sorted(near, key=lambda other: (mask ^ other).bit_count())
                chosen = np.argsort(self._merit(near, mask), kind="stable")[: each // 2]
                near = [near[index] for index in chosen.tolist()]
                near += least[: each // 2]
            found.update(near)
        return found

    def _neighbours(self, mask: int) -> set[int]:
        """Down-sets that a node, with all that has to move with it, tells from a given one.

        And those where one goes in and another, with about as much work, comes out. Of moves in
        either direction there are at most `MOVES`, those of the fewest nodes.
        """
        graph = self.graph
        outside = ~mask & ((1 << graph.size - graph.last) - 1)
        into = list(_moves(outside, graph.before, self._after))
        out = [nodes for nodes, _ in _moves(mask, self._after, graph.before)]
        found = {mask ^ nodes for nodes in out}
        work_out = (self._members(out) @ self._units).tolist()
        work_in = (self._members([nodes for nodes, _ in into]) @ self._units).tolist()
        lighter = sorted(zip(work_out, range(len(out)), strict=True))
        for (nodes, needed), work in zip(into, work_in, strict=True):
            grown = mask | nodes
            found.add(grown)
            at = bisect.bisect(lighter, (work, 0))
            for _, index in lighter[max(0, at - NEAREST) : at + NEAREST]:
                if not needed & out[index]:
                    found.add(grown ^ out[index])
        return found

    def _merit(self, near: Sequence[int], mask: int) -> Integers:
        """The less the better, up to what is the same for all."""
        members = self._members([mask, *near])
        changed = (members != members[0]).any(axis=0)
        merit = np.abs((members - members[0]) @ self._units)
        for index in np.flatnonzero(np.logical_or.reduceat(changed[self._ends], self._first)):
            value = self.graph.values[index]
            made = True if value.producer == GRAPH_INPUT else members[:, value.producer] > 0
            inside = (members[:, list(value.consumers)] > 0).all(axis=1)
            merit += self._cost[index] * (made & ~inside)
        return np.asarray(merit[1:])

    def _members(self, masks: Sequence[int]) -> Integers:
        """1 for every node that a down-set holds: shape (down-sets, nodes)."""
        return bits(masks, self.graph.size).astype(np.int64)

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


def _moves(
    movable: int, needs: Sequence[Collection[int]], needed: Sequence[Collection[int]]
) -> Iterator[tuple[int, int]]:
    """Nodes with all of the movable ones that they need, and all that these need, as bit masks.

    The `MOVES` smallest sets, the smallest first.

    Args:
        movable: nodes, as a bit mask.
        needs: of every node, those that must move before it; `needed`: the other way round.
    """
    sets: dict[int, tuple[int, int]] = {}
    missing: dict[int, int] = {}

    def ready_with(node: int) -> tuple[int, int, int, int]:
        nodes, needing = 1 << node, 0
        for other in needs[node]:
            needing |= 1 << other
            if other in sets:
                nodes |= sets[other][0]
                needing |= sets[other][1]
        return nodes.bit_count(), node, nodes, needing

    first = (node for node in range(len(needs)) if movable >> node & 1)
    ready = []
    for node in first:
        missing[node] = sum(movable >> other & 1 for other in needs[node])
        if not missing[node]:
            ready.append(ready_with(node))
    heapq.heapify(ready)
    while ready and len(sets) < MOVES:
        _, node, nodes, needing = heapq.heappop(ready)
        sets[node] = nodes, needing
        yield nodes, needing
        for other in needed[node]:
            if other in missing:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, ready_with(other))
