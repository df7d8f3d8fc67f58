"""Places to cut wide graphs: one sweep over the nodes that forgets what cannot be good.

A graph of several branches side by side has more down-sets than anybody can look at, but most of
them differ from a better one by a node on some branch. The sweep takes the nodes in a topological
order and puts each into the down-set or leaves it out. What a down-set that is made only in part
may still become depends on its *frontier*: of the nodes taken, those that some node to come
follows, whether they are in, and whether their value already has a reader outside. Of two
down-sets with the same frontier, J and J', J' rules out J when

    crossing(J') + |compute(J') - compute(J)| <= crossing(J)

with the seconds that compute and the transfers across the border take: with J' in its place, both
stages beside the border are no longer than with J. For two stages the best cut is thus among what
is left, and for more as long as no value passes a stage by and J' lies between J's neighbours;
there it is a family of good places to cut, not a proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gpipe_compiler.cluster import NO_LINK
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.orders import topological_orders
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.space import Booleans, Floats, Integers

MOST_LABELS = 6_000
"""Unfinished down-sets held at a time; of more, those that cross much go first."""

SPEEDS = (1.0, 8.0)
"""Of the link, as multiples of its own, at which the sweep is made."""

UNIT = 2**36
"""All computing together, in the whole numbers that the sweep counts with: sums are exact."""

MOST_CROSSING = 4 * UNIT
"""What crosses for longer than that is in no cut better than one stage, up to nine stages."""

_APART = 8 * UNIT

Labels = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def frontier(
    graph: Contracted,
    device_order: DeviceOrder,
    most: int,
    speeds: Sequence[float] = SPEEDS,
    labels: int = MOST_LABELS,
) -> set[int]:
    """Down-sets as bit masks that, at one of the speeds, no other down-set rules out.

    Args:
        device_order: whose devices and links count, on the average.
        most: down-sets at most. Where there are more, of those with about the same compute the one
            that crosses least stands for all.
        speeds: of the link, as multiples of its own; the faster, the more down-sets are left, as
            less crossing pays for more unequal computing. What a transfer costs that runs beside
            the computing is less than its own time.
    """
    kinds = [rate.kind for rate in device_order.rates]
    own = np.mean(
        [graph.least_s if k < 0 else graph.seconds[k, 0] + graph.seconds[k, 1] for k in kinds],
        axis=0,
    )
    links = dict.fromkeys(rate.receives for rate in device_order.rates[1:]) or {NO_LINK: None}
    order = _narrowest(graph)
    found: set[int] = set()
    for link in links:
        cost = np.array([v.receive_s(link) + v.gradient_s(link) for v in graph.values])
        for speed in speeds:
            sweep = Sweep.over(graph, order, own, cost / speed, labels)
            found |= sweep.masks(max(1, most // (len(links) * len(speeds))))
    return found


def _narrowest(graph: Contracted) -> tuple[int, ...]:
    """Of several topological orders, the one along which fewest nodes wait for followers."""

    def width(order: Sequence[int]) -> tuple[int, int]:
        leaves = _leaving(graph, order)
        waiting, widths = 0, []
        for step in range(len(order)):
            waiting += 1 - len(leaves[step])
            widths.append(waiting)
        return max(widths, default=0), sum(w * w for w in widths)

    return min(topological_orders(graph), key=width)


def _leaving(graph: Contracted, order: Sequence[int]) -> list[list[int]]:
    last = {node: step for step, node in enumerate(order)}
    for step, node in enumerate(order):
        for source in graph.before[node]:
            last[source] = max(last[source], step)
    for value in graph.values:
        if value.producer != GRAPH_INPUT:
            for consumer in value.consumers:
                last[value.producer] = max(last[value.producer], last[consumer])
    leaves: list[list[int]] = [[] for _ in order]
    for node, step in last.items():
        leaves[step].append(node)
    return leaves


@dataclass
class _Labels:
    """Down-sets in the making, one a column.

    Attributes:
        compute, crossing: seconds in units, so far.
        inside: for every node of the frontier, whether it is in.
        spilled: for every value with readers still to come, whether it lies across the border.
    """

    compute: Labels
    crossing: Labels
    some_in: Booleans
    some_out: Booleans
    inside: dict[int, Booleans]
    spilled: dict[int, Booleans]

    @classmethod
    def none(cls) -> _Labels:
        nothing, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
        return cls(nothing, nothing, no, no, {}, {})

    @property
    def size(self) -> int:
        return len(self.compute)

    def take(self, chosen: Integers | Booleans) -> _Labels:
        return _Labels(
            self.compute[chosen],
            self.crossing[chosen],
            self.some_in[chosen],
            self.some_out[chosen],
            {node: row[chosen] for node, row in self.inside.items()},
            {value: row[chosen] for value, row in self.spilled.items()},
        )

    def beside(self, other: _Labels) -> _Labels:
        """These and the others, which know of the same nodes and values."""
        return _Labels(
            np.concatenate((self.compute, other.compute)),
            np.concatenate((self.crossing, other.crossing)),
            np.concatenate((self.some_in, other.some_in)),
            np.concatenate((self.some_out, other.some_out)),
            {n: np.concatenate((row, other.inside[n])) for n, row in self.inside.items()},
            {v: np.concatenate((row, other.spilled[v])) for v, row in self.spilled.items()},
        )


@dataclass
class _Step:
    """What became of the labels at one node: where each comes from, and whether the node is in."""

    parent: Integers
    included: Booleans


@dataclass
class _Finished:
    """Down-sets to which nothing is added any more, as labels of the step at which they ended."""

    step: int
    labels: Integers
    compute: Labels
    crossing: Labels


@dataclass
class Sweep:
    """One sweep at one speed.

    Attributes:
        steps: what became of the labels, node by node.
        own: compute of every node, in units.
        cost: of every value that lies across the border, in units.
        numbers: `_numbers` of several counts.
    """

    graph: Contracted
    order: tuple[int, ...]
    own: Labels
    cost: Labels
    most_labels: int
    numbers: dict[int, Sequence[np.uint64]] = field(default_factory=dict)
    steps: list[_Step] = field(default_factory=list)
    finished: list[_Finished] = field(default_factory=list)

    @classmethod
    def over(
        cls,
        graph: Contracted,
        order: tuple[int, ...],
        own: Floats,
        cost: Floats,
        most_labels: int = MOST_LABELS,
    ) -> Sweep:
        """The sweep along an order.

        Args:
            own: seconds of every node; `cost`: of every value that lies across the border.
            most_labels: bounds time and memory. Where it is reached, down-sets in the making with
                about the same compute are thought to rule one another out.
        """
        unit = UNIT / (float(own.sum()) or 1.0)
        sweep = cls(
            graph,
            order,
            np.rint(own * unit).astype(np.int64),
            np.rint(np.minimum(cost * unit, MOST_CROSSING + 1)).astype(np.int64),
            most_labels,
        )
        sweep._run()
        return sweep

    def _run(self) -> None:
        graph = self.graph
        leaves = _leaving(graph, self.order)
        place = {node: step for step, node in enumerate(self.order)}
        read: list[list[int]] = [[] for _ in range(graph.size)]
        made: list[list[int]] = [[] for _ in range(graph.size)]
        ends: list[list[int]] = [[] for _ in range(graph.size)]
        labels = _Labels.none()
        for index, value in enumerate(graph.values):
            for consumer in value.consumers:
                read[consumer].append(index)
            ends[max(place[c] for c in value.consumers)].append(index)
            if value.producer == GRAPH_INPUT:
                labels.spilled[index] = np.zeros(1, np.bool_)
            else:
                made[value.producer].append(index)
        position = np.zeros(1, np.int64)
        roots = sum(not graph.before[node] for node in range(graph.size))
        for step, node in enumerate(self.order):
            roots -= not graph.before[node]
            grown, history = self._grow(labels, node, read[node], made[node])
            for gone in leaves[step]:
                del grown.inside[gone]
            for gone in ends[step]:
                del grown.spilled[gone]
            kept = self._keep(grown)
            labels = grown.take(kept)
            self.steps.append(_Step(position[history.parent[kept]], history.included[kept]))
            position = np.arange(labels.size)
            if not roots:
                position = self._finish(labels, step)
                labels = labels.take(position)

    def _grow(
        self, labels: _Labels, node: int, read: Sequence[int], made: Sequence[int]
    ) -> tuple[_Labels, _Step]:
        """Every label once without the node and, where it can be in, once with it."""
        may = np.full(labels.size, not (self.graph.last and node == self.graph.size - 1))
        for source in self.graph.before[node]:
            may &= labels.inside[source]
        into = np.flatnonzero(may)
        within = labels.take(into)
        within.compute = within.compute + self.own[node]
        within.some_in = np.ones(within.size, np.bool_)
        without = replace(labels, inside=dict(labels.inside), spilled=dict(labels.spilled))
        without.some_out = np.ones(without.size, np.bool_)
        for index in read:
            producer = self.graph.values[index].producer
            crosses = ~without.spilled[index]
            if producer != GRAPH_INPUT:
                crosses &= without.inside[producer]
            without.crossing = without.crossing + crosses * self.cost[index]
            without.spilled[index] = without.spilled[index] | crosses
        for part, inside in ((within, True), (without, False)):
            part.inside[node] = np.full(part.size, inside)
            for index in made:
                part.spilled[index] = np.zeros(part.size, np.bool_)
        grown = without.beside(within)
        parent = np.concatenate((np.arange(labels.size), into))
        included = np.concatenate((np.zeros(labels.size, np.bool_), np.ones(len(into), np.bool_)))
        return grown, _Step(parent, included)

    def _keep(self, labels: _Labels) -> Integers:
        """The labels that none of the same frontier rules out."""
        rows = [labels.some_in, labels.some_out, *labels.inside.values(), *labels.spilled.values()]
        state = np.zeros(labels.size, dtype=np.uint64)
        numbers = self.numbers.get(len(rows))
        if numbers is None:
            numbers = self.numbers[len(rows)] = _numbers(len(rows))
        for row, number in zip(rows, numbers, strict=True):
            state += row * number
        return _undominated(state, labels.compute, labels.crossing, self.most_labels)

    def _finish(self, labels: _Labels, step: int) -> Integers:
        """Puts those aside to which nothing can be added any more; returns the others."""
        open_ended = ~labels.some_out
        for row in labels.inside.values():
            open_ended |= row
        done = np.flatnonzero(~open_ended & labels.some_in)
        crossing = labels.crossing[done]
        for index, row in labels.spilled.items():
            if self.graph.values[index].producer == GRAPH_INPUT:
                crossing = crossing + ~row[done] * self.cost[index]
        if len(done):
            self.finished.append(_Finished(step, done, labels.compute[done], crossing))
        return np.flatnonzero(open_ended)

    def masks(self, most: int) -> set[int]:
        """The down-sets that are left, neither empty nor whole."""
        nothing = np.zeros(0, np.int64)
        compute = np.concatenate([nothing, *(part.compute for part in self.finished)])
        crossing = np.concatenate([nothing, *(part.crossing for part in self.finished)])
        chosen = _undominated(np.zeros(len(compute), np.uint64), compute, crossing, most)
        kept = np.zeros(len(compute), dtype=np.bool_)
        kept[chosen] = True
        ended: dict[int, list[Integers]] = {}
        position = 0
        for part in self.finished:
            ended.setdefault(part.step, []).append(
                part.labels[kept[position : position + len(part.labels)]]
            )
            position += len(part.labels)
        return self._trace(ended)

    def _trace(self, ended: Mapping[int, Sequence[Integers]]) -> set[int]:
        """The masks of labels, by the step at which they ended, followed back to the start."""
        rows = np.zeros(0, dtype=np.int64)
        member = np.zeros((self.graph.size, sum(len(p) for ps in ended.values() for p in ps)), bool)
        for step in reversed(range(len(self.steps))):
            for part in ended.get(step, ()):
                rows = np.concatenate((rows, part))
            if len(rows):
                member[self.order[step], : len(rows)] = self.steps[step].included[rows]
                rows = self.steps[step].parent[rows]
        packed = np.packbits(member.T, axis=1, bitorder="little")
        return {int.from_bytes(row.tobytes(), "little") for row in packed}


def _numbers(count: int) -> Sequence[np.uint64]:
    """Odd-looking numbers whose sums over subsets do not coincide."""
    generator = np.random.Generator(np.random.PCG64(count))
    return list(generator.integers(0, 2**64, size=count, dtype=np.uint64))


def _undominated(state: Keys, compute: Labels, crossing: Labels, most: int) -> Integers:
    """Positions of the labels that no other of the same state rules out, ascending; few enough."""
    chosen = np.flatnonzero(crossing <= MOST_CROSSING)
    group = np.zeros(len(state), dtype=np.int64)
    group[chosen] = np.unique(state[chosen], return_inverse=True)[1].reshape(-1)
    chosen = chosen[_least(group[chosen], compute[chosen], crossing[chosen])]
    chosen = chosen[_survives(group[chosen], compute[chosen], crossing[chosen])]
    # The other way round; of equals the first pass has left one.
    back = chosen[::-1]
    chosen = back[_survives(group[back], -compute[back], crossing[back])]
    width = UNIT >> 12
    while len(chosen) > most and width <= UNIT:
        chosen = chosen[_least(group[chosen], compute[chosen] // width, crossing[chosen])]
        width *= 2
    if len(chosen) > most:
        chosen = chosen[np.argsort(crossing[chosen], kind="stable")[:most]]
    return np.sort(chosen)


def _least(group: Labels, place: Labels, crossing: Labels) -> Integers:
    """For every group and place in it, the position where least crosses, the first such.

    They are in ascending order of groups and places. Whole numbers are sorted many times as fast
    as rows of several.
    """
    if not len(group):
        return np.zeros(0, np.int64)
    keys = group * (2 * UNIT) + place
    order = np.argsort(keys)
    keys, crossing = keys[order], crossing[order]
    begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    counts = np.diff(begins, append=len(keys))
    least = np.repeat(np.minimum.reduceat(crossing, begins), counts)
    return np.asarray(np.minimum.reduceat(np.where(crossing == least, order, len(keys)), begins))


def _survives(group: Labels, compute: Labels, crossing: Labels) -> Booleans:
    """Whether none before it, of the same group, rules a label out.

    Labels of a group are together, in ascending order of compute.
    """
    first = np.ones(len(group), dtype=np.bool_)
    first[1:] = group[1:] != group[:-1]
    # Later groups get lower numbers, so that what is least so far lies in the label's own group.
    value = crossing - compute - np.cumsum(first) * _APART
    alive = np.ones(len(group), dtype=np.bool_)
    alive[1:] = first[1:] | (value[1:] < np.minimum.accumulate(value)[:-1])
    return alive
