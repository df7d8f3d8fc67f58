"""Few good places to cut: along several orders of the nodes, close to one another where asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.cluster import NO_LINK
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.orders import neighbours, topological_orders
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.space import Integers, bits

WHOLE = 2**40
"""The computing of the whole graph, in the whole numbers that are counted with: sums are exact."""

MOST_COST = 8 * WHOLE
"""What crosses for longer than that is in no cut worth a thought."""

MOVES = 300
"""Moves in and out of a down-set that are tried."""


@dataclass(frozen=True)
class Row:
    """The prefixes of one topological order; entry i is for the first i nodes.

    Attributes:
        work: computing inside, in shares of `WHOLE`.
        crossing: to move what is made inside and used outside, and its gradients back; likewise.
    """

    order: tuple[int, ...]
    work: Integers
    crossing: Integers

    @classmethod
    def of(cls, graph: Contracted, order: tuple[int, ...], units: Integers, cost: Integers) -> Row:
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
        """At most so many prefixes with work from `low` to `high`.

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
    rows: tuple[Row, ...]
    _after: list[list[int]]
    _units: Integers
    _cost: Integers

    @classmethod
    def of(cls, graph: Contracted, lineup: DeviceOrder) -> Places:
        """Those of a graph.

        Args:
            lineup: whose links count, the fastest of them.
        """
        links = {pace.receives for pace in lineup.paces[1:]} or {NO_LINK}
        cost_s = [min(v.receive_s(k) + v.gradient_s(k) for k in links) for v in graph.values]
        least = graph.least_s
        unit = WHOLE / (float(least.sum()) or 1.0)
        units = np.rint(least * unit).astype(np.int64)
        cost = np.rint(np.minimum(np.array(cost_s) * unit, MOST_COST)).astype(np.int64)
        orders = topological_orders(graph)
        rows = tuple(Row.of(graph, order, units, cost) for order in orders)
        return cls(graph, rows, graph.after(), units, cost)

    def everywhere(self, most: int) -> set[int]:
        """So many of all of them, as bit masks."""
        return self._about([WHOLE / 2], 1.0, most)

    def near(self, masks: Sequence[int], share: float, most: int) -> set[int]:
        """So many of those that hold about as much work as one of these down-sets.

        Args:
            share: of all work, how wide the ranges are about those of the masks.
        """
        work = self._members(masks) @ self._units
        return self._about(work.tolist(), share, most)

    def beside(self, masks: Sequence[int], most: int) -> set[int]:
        """So many down-sets that one move tells from one of these (`neighbours`).

        Those that cross least, a difference in work counting as much as crossing.
        """
        found: set[int] = set()
        each = max(1, most // max(1, len(masks)))
        for mask in masks:
            near = sorted(neighbours(self.graph, self._after, mask, MOVES))
            if len(near) > each:
                least = sorted(near, key=lambda other: (mask ^ other).bit_count())
                chosen = np.argsort(self._merit(near, mask), kind="stable")[: each // 2]
                near = [near[index] for index in chosen.tolist()]
                near += least[: each // 2]
            found.update(near)
        return found

    def _merit(self, near: Sequence[int], mask: int) -> Integers:
        """The less the better, up to what is the same for all."""
        members = self._members([mask, *near])
        changed = (members != members[0]).any(axis=0)
        merit = np.abs((members - members[0]) @ self._units)
        for value, cost in zip(self.graph.values, self._cost.tolist(), strict=True):
            given = value.producer == GRAPH_INPUT
            users = list(value.consumers)
            if (not given and changed[value.producer]) or changed[users].any():
                made = True if given else members[:, value.producer] > 0
                merit += cost * (made & ~(members[:, users] > 0).all(axis=1))
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
