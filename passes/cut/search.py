"""The search for the best chain of down-sets: from the last stage to the first, by labels.

A label stands for one way to cut all that lies outside a down-set into the last stages of the
pipeline. It carries what the time of the whole step depends on, in such a form that a label
nowhere larger than another is at least as good whatever comes before. So of the labels of a
down-set only those are kept that no other dominates, and of these only those whose lower bound
is below the best cut known.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.space import BLOCK, Booleans, Floats, Integers, Pairs, Space
from gpipe_compiler.passes.cut.tables import BoundTables

TOLERANCE = 1e-10
"""Relative: cuts closer together than this count as equally good."""


@dataclass(frozen=True)
class Extensions:
    """One new stage put before each of several labels: arrays of one length.

    `start` and `end` are the down-sets that the stage lies between, `label` the row of the label,
    `times` as in `StageRow`.
    """

    start: Integers
    end: Integers
    label: Integers
    times: Floats

    def take(self, chosen: Integers) -> Extensions:
        """Those at these positions."""
        return Extensions(
            self.start[chosen], self.end[chosen], self.label[chosen], self.times[:, chosen]
        )


class Criterion(ABC):
    """How the time of a step follows from its stages, last stage first.

    Attributes:
        beam: labels kept per stage at most.
    """

    beam: int

    @property
    def most_extensions(self) -> int | None:
        """Labels worked out per stage at most; None where that costs next to nothing."""
        return None

    @abstractmethod
    def initial(self) -> Floats:
        """The label of no stage at all, one dimension."""

    @abstractmethod
    def promise(self, space: Space, tables: BoundTables, stage: int, stages: int) -> Floats:
        """For every down-set: no cut with stages `stage`, ... after it takes less than this."""

    def cheap(
        self, space: Space, tables: BoundTables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """A lower bound for each extension, found before the extended label is."""
        return np.zeros(len(new.start))

    @abstractmethod
    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """The labels (rows of `labels`, one per extension) with the new stage put before."""

    @abstractmethod
    def bound(
        self, space: Space, tables: BoundTables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """The least time of a whole step with these labels; exact when `stage` is 0."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search has found.

    Attributes:
        chain: indices of down-sets from the empty one to the whole; None when nothing in the
            family is better than the incumbent.
        bound_s: no cut of the family takes less, or less than the incumbent if that is lower.
        all_seen: whether nothing was given up for want of room.
    """

    chain: tuple[int, ...] | None
    bound_s: float
    all_seen: bool


@dataclass(frozen=True)
class _Layer:
    """All labels of one stage, sorted by down-set."""

    state: Integers
    parent: Integers
    labels: Floats
    bounds: Floats


def search(
    space: Space,
    device_order: DeviceOrder,
    tables: BoundTables,
    criterion: Criterion,
    incumbent_s: float,
) -> SearchResult:
    """The best cut of the family on an order of devices, if better than the incumbent.

    Stages that are alone too large for their devices are left out.
    """
    stages = device_order.stages
    layer = _Layer(
        np.array([space.size - 1]), np.array([-1]), criterion.initial()[None, :], np.array([0.0])
    )
    layers = [layer]
    ceiling = incumbent_s * (1 - TOLERANCE)
    dropped = math.inf
    for stage in reversed(range(stages)):
        promise = criterion.promise(space, tables, stage, stages)
        starts = np.flatnonzero((promise < ceiling) & np.isfinite(tables.forward_s[stage]))
        work = _Work(space, device_order, tables, criterion, stage)
        layer, lost = _next_layer(work, starts, layer, ceiling)
        dropped = min(dropped, lost)
        if not len(layer.state):
            return SearchResult(None, min(dropped, incumbent_s), math.isinf(dropped))
        layers.append(layer)
    best = int(np.argmin(layer.bounds))
    value = float(layer.bounds[best])
    chain = []
    for level in reversed(layers):
        chain.append(int(level.state[best]))
        best = int(level.parent[best])
    return SearchResult(tuple(chain), min(dropped, incumbent_s, value), math.isinf(dropped))


@dataclass(frozen=True, slots=True)
class _Work:
    """Putting one stage before all labels of the stage after it."""

    space: Space
    device_order: DeviceOrder
    tables: BoundTables
    criterion: Criterion
    stage: int


def _next_layer(
    work: _Work, starts: Integers, layer: _Layer, ceiling: float
) -> tuple[_Layer, float]:
    """The labels with one more stage before them, and the least bound among those given up."""
    space, criterion = work.space, work.criterion
    first = np.searchsorted(layer.state, np.arange(space.size))
    count = np.searchsorted(layer.state, np.arange(space.size), side="right") - first
    pool = _Pool(criterion.most_extensions)
    blocks: list[_Layer] = []
    for pairs in space.blocks(work.device_order.rates[work.stage], starts):
        alive = np.flatnonzero(count[pairs.end])
        if work.device_order.limited and len(alive):
            held = pairs.held[:, alive]
            alive = alive[work.device_order.excess(work.stage, 1, held)[0] <= 0]
        for some in _in_parts(pairs, alive, count):
            new = _extensions(pairs, some, first, count)
            if criterion.most_extensions is None:
                blocks.append(_extend(work, new, layer, ceiling))
                continue
            cheap = criterion.cheap(space, work.tables, work.stage, new, layer.labels)
            cheap = np.maximum(cheap, layer.bounds[new.label])
            chosen = np.flatnonzero(cheap < ceiling)
            pool.add(new.take(chosen), cheap[chosen])
    if pool.held:
        blocks.append(_extend(work, pool.empty(), layer, ceiling))
    if not blocks:
        nothing = np.array([], dtype=np.int64)
        return _Layer(nothing, nothing, layer.labels[:0], np.array([])), pool.lost
    merged = _Layer(
        np.concatenate([b.state for b in blocks]),
        np.concatenate([b.parent for b in blocks]),
        np.concatenate([b.labels for b in blocks]),
        np.concatenate([b.bounds for b in blocks]),
    )
    kept, given_up = _narrow(merged.bounds, criterion.beam)
    return _pick(merged, np.sort(kept)), min(pool.lost, given_up)


class _Pool:
    """Extensions that wait to be worked out: the most promising ones, where there are too many.

    Attributes:
        lost: the least bound among those given up.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self.held: list[Extensions] = []
        self._bounds: list[Floats] = []
        self.lost = float("inf")

    def add(self, new: Extensions, bounds: Floats) -> None:
        self.held.append(new)
        self._bounds.append(bounds)
        if self._most is not None and sum(map(len, self._bounds)) > self._most:
            together, ranks = _join(self.held), np.concatenate(self._bounds)
            kept, given_up = _narrow(ranks, self._most)
            kept = np.sort(kept)
            self.held, self._bounds = [together.take(kept)], [ranks[kept]]
            self.lost = min(self.lost, given_up)

    def empty(self) -> Extensions:
        together = _join(self.held)
        self.held, self._bounds = [], []
        return together


def _join(parts: list[Extensions]) -> Extensions:
    return Extensions(
        np.concatenate([e.start for e in parts]),
        np.concatenate([e.end for e in parts]),
        np.concatenate([e.label for e in parts]),
        np.concatenate([e.times for e in parts], axis=1),
    )


def _in_parts(pairs: Pairs, alive: Integers, count: Integers) -> Iterator[Integers]:
    """These stages in turn, all of a down-set together, as many as are about a block with
    the labels where they end."""
    if not len(alive):
        return
    made = np.cumsum(count[pairs.end[alive]])
    begins = np.flatnonzero(np.diff(pairs.start[alive], prepend=-1))
    low = 0
    for high in (*begins[1:].tolist(), len(alive)):
        if high == len(alive) or made[high - 1] - (made[low - 1] if low else 0) >= BLOCK:
            yield alive[low:high]
            low = high


def _extensions(pairs: Pairs, chosen: Integers, first: Integers, count: Integers) -> Extensions:
    """These stages, once for each label where they end."""
    repeats = count[pairs.end[chosen]]
    pair = np.repeat(chosen, repeats)
    offset = np.arange(len(pair)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    end = pairs.end[pair]
    return Extensions(pairs.start[pair], end, first[end] + offset, pairs.times[:, pair])


def _extend(work: _Work, new: Extensions, layer: _Layer, ceiling: float) -> _Layer:
    """The labels that extensions lead to, sorted by down-set, dominated ones gone.

    Extensions are in ascending order of their down-sets, all of one down-set together.
    """
    labels = work.criterion.extend(work.stage, new, layer.labels[new.label])
    bounds = work.criterion.bound(work.space, work.tables, work.stage, new.start, labels)
    chosen = np.flatnonzero(bounds < ceiling)
    block = _Layer(new.start[chosen], new.label[chosen], labels[chosen], bounds[chosen])
    return _pick(block, undominated(block.labels, block.state))


def _narrow(bounds: Floats, beam: int) -> tuple[Integers, float]:
    """The positions of the `beam` smallest bounds, and the smallest of the others."""
    if len(bounds) <= beam:
        return np.arange(len(bounds)), float("inf")
    order = np.argsort(bounds, kind="stable")
    return order[:beam], float(bounds[order[beam]])


def _pick(layer: _Layer, chosen: Integers) -> _Layer:
    return _Layer(
        layer.state[chosen], layer.parent[chosen], layer.labels[chosen], layer.bounds[chosen]
    )


# --- which labels no other dominates ----------------------------------------------------------


GLANCE = 8
"""Entries of two labels that are compared before all are."""

ABREAST = 32
"""Labels at most that are compared with all others at once."""


def undominated(labels: Floats, state: Integers) -> Integers:
    """Those labels that no other of the same down-set dominates, ascending.

    Args:
        labels: a label a row.
        state: the down-set of each, ascending.
    """
    if not len(labels):
        return np.array([], dtype=np.int64)
    if labels.shape[1] == 2:
        return np.sort(_staircases(labels, state))
    borders = np.flatnonzero(np.diff(state)) + 1
    groups = np.split(np.arange(len(state)), borders)
    return np.concatenate([g if len(g) < 2 else _of_one(labels, g) for g in groups])


def _of_one(labels: Floats, group: Integers) -> Integers:
    """Those of a group of labels, of one down-set, that none of its others dominates."""
    labels = labels[group]
    labels = labels[:, np.isfinite(labels[0])]
    order = np.argsort(labels.sum(axis=1), kind="stable")
    slack = TOLERANCE * float(np.abs(labels).max(initial=0.0)) / 100
    columns = np.ascontiguousarray(labels[order].T)
    abreast = min(ABREAST, max(1, 10 * BLOCK // max(1, columns.size)))
    rest = np.arange(len(order))
    kept = []
    while len(rest):
        block, rest = rest[:abreast], rest[abreast:]
        among = _beaten(columns, block, block, slack)
        alive = np.ones(len(block), dtype=np.bool_)
        for position in range(len(block)):
            if alive[position]:
                alive[position + 1 :] &= ~among[position, position + 1 :]
        block = block[alive]
        kept.append(block)
        rest = rest[~_beaten(columns, block, rest, slack).any(axis=0)]
    return np.sort(group[order[np.concatenate(kept)]])


def _beaten(columns: Floats, ours: Integers, others: Integers, slack: float) -> Booleans:
    """For each of our labels and each of the others, whether the other is nowhere less.

    Args:
        columns: entries of all labels, a label a column, as numpy compares long rows fastest.
    """
    found = np.ones((len(ours), len(others)), dtype=np.bool_)
    glance = max(1, len(columns) // GLANCE)
    for entries in columns[::glance]:
        found &= entries[others] >= entries[ours][:, None] - slack
    if glance > 1:
        one, other = np.nonzero(found)
        first, second = columns[:, ours[one]], columns[:, others[other]]
        found[one, other] = (second >= first - slack).all(axis=0)
    return found


def _staircases(labels: Floats, state: Integers) -> Integers:
    """The same for labels of two numbers: in ascending order of one, the other must descend.

    Numbers are compared by their ranks. As those of every further down-set count as lower than all
    before, the least so far begins anew there.
    """
    group = state.astype(np.int64)
    ranks = [np.unique(entries, return_inverse=True)[1].reshape(-1) for entries in labels.T]
    # Whole numbers are sorted several times as fast as rows of several numbers.
    keys = (group * len(state) + ranks[0]) * len(state) + ranks[1]
    order = np.argsort(keys)
    sorted_keys = keys[order]
    begins = np.flatnonzero(np.concatenate(([True], sorted_keys[1:] != sorted_keys[:-1])))
    order = np.minimum.reduceat(order, begins)  # of equal labels the first
    second = ranks[1][order] - group[order] * len(state)
    least = np.minimum.accumulate(second)
    lower = second[1:] < least[:-1]
    return np.asarray(order[np.concatenate(([True], lower))])
