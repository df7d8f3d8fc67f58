"""Chains of places to cut that open few modules: by labels, from the first stage to the last.

A label is a way to cut what lies in a down-set into the first stages. It says how much that opens,
and how busy the devices are. Of the labels of a place the least open are kept, of equal ones those
with the least busy devices. What is opened is counted once: of two ends of a stage, the second adds
the modules that it divides and the first does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.modules import ModuleNodes, weights
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import Booleans, Floats, Integers, bits

ROWS = 400_000
"""Ways to go on from all labels of one stage, about, at most."""

FEWEST = 4
"""Labels of a place that are kept, at least."""


class CutPlaces:
    """A family of down-sets of a graph, smaller ones first, and the modules that each divides.

    Attributes:
        member: whether a node is in a down-set; shape (down-sets, nodes).
        divides: what a stage opens that begins at one of two down-sets and ends at the other;
            shape (starts, ends).
        opens: what each of them divides.
    """

    def __init__(
        self, graph: Contracted, modules: Sequence[ModuleNodes], masks: Iterable[int]
    ) -> None:
        self.graph = graph
        chosen = {*masks, 0, (1 << graph.size) - 1}
        self.masks = sorted(chosen, key=lambda mask: (mask.bit_count(), mask))
        self.member = bits(self.masks, graph.size)
        columns = np.ascontiguousarray(self.member.T)
        node_of = {node: index for index, members in enumerate(graph.members) for node in members}
        divided = np.zeros((self.size, len(modules)), dtype=np.bool_)
        for index, module in enumerate(modules):
            held = columns[sorted({node_of[node] for node in module.nodes})]
            divided[:, index] = held.any(axis=0) & ~held.all(axis=0)
        weight = weights(modules)
        self.opens: Integers = divided @ weight
        self._divided, self._weight = divided, weight

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.masks)

    def opening(self) -> Integers:
        """What a stage opens with its end, that its start does not; shape (starts, ends)."""
        again = (self._divided * self._weight) @ self._divided.T.astype(np.int64)
        return np.asarray(self.opens[None, :] - again)

    def before(self) -> Booleans:
        """Whether a down-set is a part of another, and not the same; shape (starts, ends)."""
        beyond = self.member.astype(np.float32) @ (~self.member).astype(np.float32).T
        return np.asarray((beyond == 0) & ~np.eye(self.size, dtype=bool))

    def ends(self, stage: int, stages: int) -> Integers:
        """Where a stage may end, by the stages that nodes may lie in."""
        if stage == stages - 1:
            return np.array([self.size - 1])
        must = np.array(self.graph.last_stage) <= stage
        cannot = np.array(self.graph.first_stage) > stage
        wrong = (~self.member & must).any(axis=1) | (self.member & cannot).any(axis=1)
        return np.flatnonzero(~wrong)


def opened_by_prefixes(graph: Contracted, modules: Sequence[ModuleNodes]) -> Integers:
    """What a cut after each number of nodes opens, along the order of the graph."""
    place = {node: index for index, members in enumerate(graph.members) for node in members}
    steps = np.zeros(graph.size + 2, dtype=np.int64)
    for module, weight in zip(modules, weights(modules), strict=True):
        places = [place[node] for node in module.nodes]
        steps[min(places) + 1] += weight
        steps[max(places) + 1] -= weight
    return np.cumsum(steps)[:-1]


class ChainSeconds:
    """How long stages between places compute on one order of devices, and what they receive."""

    def __init__(self, places: CutPlaces, setting: CutSetting, lineup: DeviceOrder) -> None:
        graph = places.graph
        self.lineup, self.step = lineup, setting.objective is Objective.STEP
        self.device_of = lineup.placement if self.step else tuple(range(setting.stages))
        self._inside = places.member @ graph.seconds[:, :2].transpose(2, 0, 1).reshape(
            graph.size, -1
        )
        self.least: Floats = places.member @ graph.least_s
        moving = np.zeros((places.size, 4))
        for value in graph.values:
            users = places.member[:, list(value.consumers)]
            made = (
                np.ones(places.size, dtype=bool)
                if value.producer == GRAPH_INPUT
                else places.member[:, value.producer]
            )
            live = made & ~users.all(axis=1)
            moving[live] += (value.sends, value.bytes, value.returns, value.gradient_bytes)
        self._moving = moving

    def compute(self, stage: int, start: Integers, end: Integers) -> Floats:
        """Seconds of a micro-batch."""
        kind = self.lineup.devices[self.lineup.placement[stage]].kind
        forward, backward = self._inside[:, 2 * kind], self._inside[:, 2 * kind + 1]
        total = forward * (1.0 + float(self.lineup.again[stage])) + backward
        return np.asarray(total[end] - total[start])

    def port(self, stage: int, start: Integers) -> Floats:
        """Seconds in which a stage receives what the stages before it have made, or sends its
        gradients back; both where the objective is the longest stage."""
        if not stage:
            return np.zeros(len(start))
        link = self.lineup.between(stage - 1, stage)
        sends, size, returns, gradient = self._moving[start].T
        there = sends * link.latency_s + size / link.bandwidth
        back = returns * link.latency_s + gradient / link.bandwidth
        return np.asarray(np.maximum(there, back) if self.step else there + back)


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one stage, a row each.

    Attributes:
        place: where the stage ends.
        cost: what is opened so far.
        busy: seconds of a micro-batch on every device; of the longest port, last.
        least: the same on the fastest devices, without ports.
        before: the row of the label of the stage before.
    """

    place: Integers
    cost: Integers
    busy: Floats
    least: Floats
    before: Integers

    def rows(self, chosen: Integers) -> Labels:
        """Some of them."""
        return Labels(
            self.place[chosen],
            self.cost[chosen],
            self.busy[chosen],
            self.least[chosen],
            self.before[chosen],
        )


class Chains:
    """The search.

    Args:
        longest_s: a device that computes for longer rules a cut out, however fast.

    Attributes:
        all: whether no label has been left out so far for want of room.
    """

    def __init__(self, places: CutPlaces, seconds: ChainSeconds, longest_s: float) -> None:
        self.places, self.seconds, self.longest_s = places, seconds, longest_s
        self.all = True
        self._opening, self._before = places.opening(), places.before()
        self._most = max(FEWEST, ROWS // places.size**2)
        self._rest = seconds.least[-1] - seconds.least

    def busiest(self, chain: Sequence[int]) -> float:
        """Seconds of a micro-batch on the busiest device, or in the slowest port.

        Args:
            chain: the ends of the stages, as down-sets.
        """
        index = {mask: place for place, mask in enumerate(self.places.masks)}
        start = np.array([0])
        busy = np.zeros((1, max(self.seconds.device_of) + 2))
        for stage, mask in enumerate(chain):
            end = np.array([index[mask]])
            self._add(busy, stage, start, end)
            start = end
        return float(busy.max())

    def found(self, busiest_s: float) -> list[tuple[int, float, tuple[int, ...]]]:
        """What chains open, how busy the busiest device is, and their ends: the least open first.

        Args:
            busiest_s: more than this no device or port may take for a micro-batch.
        """
        stages = len(self.seconds.lineup.placement)
        devices = max(self.seconds.device_of) + 1
        zero = np.zeros(1, dtype=np.int64)
        layers = [Labels(zero, zero, np.zeros((1, devices + 1)), np.zeros((1, devices)), zero)]
        for stage in range(stages):
            layers.append(self._longer(layers[-1], stage, stages, busiest_s))
        busy = layers[-1].busy.max(axis=1, initial=0.0)
        order = np.lexsort((busy, layers[-1].cost))
        found = []
        for row in order.tolist():
            chain, at = [], row
            for layer in reversed(layers[1:]):
                chain.append(int(layer.place[at]))
                at = int(layer.before[at])
            found.append((int(layers[-1].cost[row]), float(busy[row]), tuple(reversed(chain))))
        return found

    def _longer(self, labels: Labels, stage: int, stages: int, busiest_s: float) -> Labels:
        """The labels with one stage more."""
        ends = self.places.ends(stage, stages)
        rows, columns = np.nonzero(self._before[labels.place][:, ends])
        start, end = labels.place[rows], ends[columns]
        busy, least = labels.busy[rows], labels.least[rows]
        self._add(busy, stage, start, end)
        least[:, self.seconds.device_of[stage]] += (
            self.seconds.least[end] - self.seconds.least[start]
        )
        alive = (busy.max(axis=1) <= busiest_s) & (least.max(axis=1) <= self.longest_s)
        cost = labels.cost[rows] + self._opening[start, end]
        new = Labels(end, cost, busy, least, rows).rows(np.flatnonzero(alive))
        order = np.lexsort((new.busy.max(axis=1, initial=0.0), new.cost, new.place))
        new = new.rows(order)
        first = np.searchsorted(new.place, new.place)
        kept = np.flatnonzero(np.arange(len(new.place)) - first < self._most)
        self.all &= len(kept) == len(new.place)
        return new.rows(kept)

    def _add(self, busy: Floats, stage: int, start: Integers, end: Integers) -> None:
        """What a stage takes, added to what its device does."""
        device = self.seconds.device_of[stage]
        port = self.seconds.port(stage, start)
        busy[:, device] += self.seconds.compute(stage, start, end)
        if self.seconds.step:
            np.maximum(busy[:, -1], port, out=busy[:, -1])
        else:
            busy[:, device] += port
