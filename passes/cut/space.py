"""Families of down-sets of a contracted problem, and what a stage between two of them costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import StageRates
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, Resident

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

CACHED_PAIRS = 3_000_000
"""Pairs of down-sets whose costs are kept (some 60 bytes each); others are worked out anew."""

FORWARD, BACKWARD, RECEIVE, GRADIENT, WEIGHT, UPDATE, SEND = range(7)
"""The rows of `StageRow.times`."""


class Space:
    """A family of down-sets, ordered so that a set comes after all its subsets.

    Index 0 is the empty set, the last index the whole graph.

    Attributes:
        inside: seconds of computing inside each down-set, shape (kinds + 1, 3, down-sets), the
            last kind the fastest of all for every node; the rows as of `Contracted.seconds`.
        moving: of every value, the columns `sends` to `gradient_bytes` of `Movable`.
    """

    def __init__(self, graph: Contracted, masks: Iterable[int]) -> None:
        self.graph = graph
        whole = (1 << graph.size) - 1
        pinned = 1 << (graph.size - 1) if graph.last else 0
        alone = graph.last and not graph.last_alone
        forbidden = whole ^ pinned if alone else whole
        chosen = {m for m in masks if not m & pinned and m != forbidden} | {0, whole}
        member = bits(list(chosen), graph.size)
        # Integer sums are exact, so that no set sorts before its subset.
        least = graph.least_s
        scale = float(least.sum()) or 1.0
        weights = np.rint(least / scale * 2**40).astype(np.int64)
        work = _products(member, weights)
        order = np.lexsort((np.array(list(map(_key, chosen))), member.sum(axis=1), work))
        unsorted = list(chosen)
        self.masks = [unsorted[i] for i in order]
        self._work = work[order]
        self._scale = scale / 2**40
        self.member: Booleans = np.ascontiguousarray(member[order].T)
        self.nodes: Integers = self.member.sum(axis=0)
        self.size = len(self.masks)
        self.inside = _inside(graph, self.member)
        self._edges()
        self.limit_s = float("inf")
        self._rows: dict[StageRates, dict[int, StageRow]] = {}
        self._short: dict[StageRates, dict[int, StageRow]] = {}
        self._cached = 0
        self._allowed: dict[int, Booleans] = {}

    def _edges(self) -> None:
        """For every down-set, its maximal nodes, and what lies across its border."""
        graph = self.graph
        followed = np.zeros_like(self.member)
        for node, before in enumerate(graph.before):
            for source in before:
                followed[source] |= self.member[node]
        self._maximal = np.ascontiguousarray((self.member & ~followed).T)
        live = np.zeros((len(graph.values), self.size), dtype=np.bool_)
        given = np.zeros(self.size)
        for index, value in enumerate(graph.values):
            made = np.ones(self.size, dtype=np.bool_)
            made[0] = False
            users = self.member[list(value.consumers)]
            if value.producer == GRAPH_INPUT:
                given += np.logical_or.reduce(users) * value.bytes
            else:
                made = self.member[value.producer]
            live[index] = made & ~np.logical_and.reduce(users)
        self._live = np.ascontiguousarray(live.T)
        self._given = given
        self.moving = np.array(
            [[v.sends, v.bytes, v.returns, v.gradient_bytes] for v in graph.values]
        ).reshape(-1, 4)
        self._crossing: Floats = np.stack([_products(self._live, c) for c in self.moving.T])
        touched = np.zeros((3, self.size))
        split = np.zeros((len(graph.kept), self.size), dtype=np.bool_)
        for index, kept in enumerate(graph.kept):
            users = self.member[list(kept.users)]
            some = np.logical_or.reduce(users)
            touched += np.array(_columns(kept))[:, None] * some
            split[index] = some & ~np.logical_and.reduce(users)
        self._touched = touched
        self._split = np.ascontiguousarray(split.T)

    def limit(self, seconds: float) -> None:
        """From now on leave out stages that compute for longer than this on any device."""
        if seconds < self.limit_s:
            self._limited_to(seconds)

    def unlimited(self) -> Space:
        """Itself, with all stages again."""
        self._limited_to(float("inf"))
        return self

    def _limited_to(self, seconds: float) -> None:
        self.limit_s = seconds
        self._short = {}

    def row(self, start: int, rate: StageRates) -> StageRow:
        """The stages that begin at a down-set, those left out that compute for too long."""
        short = self._short.setdefault(rate, {})
        row = short.get(start)
        if row is not None:
            return row
        known = self._rows.setdefault(rate, {})
        row = known.get(start)
        if row is None:
            row = self._row(start, rate)
            if self._cached + len(row.ends) <= CACHED_PAIRS:
                known[start] = row
                self._cached += len(row.ends)
        count = int(np.searchsorted(row.ends, self._stop(start)))
        if count < len(row.ends):
            row = StageRow(row.ends[:count], row.times[:, :count], row.held[:, :count])
        if start in known:  # of which this is a view, and takes no memory
            short[start] = row
        return row

    def blocks(self, rate: StageRates, starts: Integers) -> Iterator[Pairs]:
        """The stages that begin at these down-sets, some `BLOCK` at a time."""
        return stacked(partial(self.row, rate=rate), starts)

    def _stop(self, start: int) -> int:
        """Before which down-set stages end that begin at this one."""
        if not np.isfinite(self.limit_s):
            return self.size
        most = self._work[start] + self._longest
        return int(np.searchsorted(self._work, most, side="right"))

    @property
    def _longest(self) -> int:
        """The limit in units of `_work`, of which there are no more than all work has."""
        units = min(self.limit_s / self._scale * (1 + 1e-9), float(self._work[-1]))
        return int(units) + self.size + 1

    def within(self, stages: int) -> Booleans:
        """Whether j stages may hold a down-set and all others the rest, as limited: [j, I]."""
        if not np.isfinite(self.limit_s):
            return np.ones((stages + 1, self.size), dtype=np.bool_)
        counts = np.arange(stages + 1)[:, None]
        work = np.asarray(self._work, dtype=np.int64)
        before = work <= counts * self._longest
        return np.asarray(before & (work[-1] - work <= counts[::-1] * self._longest))

    def ends(self, start: int) -> Integers:
        """The down-sets at which a stage may end that begins at this one."""
        stop = self._stop(start)
        begin = start + 1
        window = slice(begin, stop)
        fits = np.ones(max(stop - begin, 0), dtype=np.bool_)
        for node in np.flatnonzero(self._maximal[start]):
            fits &= self.member[node, window]
        for one, other in self.graph.apart:
            if not self.member[one, start] and not self.member[other, start]:
                fits &= ~(self.member[one, window] & self.member[other, window])
        return np.flatnonzero(fits) + begin

    def live(self, start: int) -> Integers:
        """The values made before this down-set, or given to the first stage, and used after it."""
        return np.flatnonzero(self._live[start])

    def used(self, start: int, value: int, ends: Integers) -> Booleans:
        """Whether stages from one down-set to each of several use a value."""
        return self._any(self.graph.values[value].consumers, start, ends)

    def _any(self, nodes: Sequence[int], start: int, ends: Integers) -> Booleans:
        """Whether stages from one down-set to each of several hold any of these nodes."""
        found = np.zeros(len(ends), dtype=np.bool_)
        for node in nodes:
            if not self.member[node, start]:
                found |= self.member[node][ends]
        return found

    def through(self, value: int, ends: Integers) -> Booleans:
        """Whether a value is used outside each of several down-sets."""
        return np.asarray(self._live[ends, value])

    def crossing(self, values: Sequence[int]) -> Booleans:
        """Whether each of these is made in each down-set and used outside: (down-sets, values)."""
        return np.asarray(self._live[:, list(values)])

    def readers(self, values: Sequence[int]) -> Integers:
        """How many nodes of each down-set use each of these values: (down-sets, values)."""
        found = np.zeros((self.size, len(values)), dtype=np.int64)
        for column, value in enumerate(values):
            found[:, column] = self.member[list(self.graph.values[value].consumers)].sum(axis=0)
        return found

    def _row(self, start: int, rate: StageRates) -> StageRow:
        ends = self.ends(start)
        live = self.live(start)
        crossed, passed = np.zeros((2, 4, len(ends)))
        if len(live):
            moving = self.moving[live].T
            crossed = moving @ np.stack([self.used(start, v, ends) for v in live])
            passed = moving @ self._live[np.ix_(ends, live)].T
        held = self._touched[:, ends] - self._touched[:, [start]]
        for index in np.flatnonzero(self._split[start]):
            kept = self.graph.kept[index]
            held += np.array(_columns(kept))[:, None] * self._any(kept.users, start, ends)
        taken = crossed[1] if start else crossed[1] + self._given[ends]
        sent = self._crossing[:, ends] - passed
        times = np.empty((7, len(ends)))
        inside = self.inside[rate.kind]
        seconds = inside[:, ends] - inside[:, [start]]
        times[FORWARD], times[BACKWARD], times[WEIGHT] = seconds
        link = rate.receives
        times[RECEIVE] = crossed[0] * link.latency_s + crossed[1] / link.bandwidth
        times[GRADIENT] = crossed[2] * link.latency_s + crossed[3] / link.bandwidth
        updated = held[2]
        times[UPDATE] = updated * rate.update_s_per_byte + (updated > 0) * rate.update_latency_s
        link = rate.sends
        times[SEND] = (sent[0] + sent[2]) * link.latency_s + (sent[1] + sent[3]) / link.bandwidth
        return StageRow(ends, times, np.stack((held[0], taken, held[1])))

    def stages_of(self, chain: Sequence[int]) -> Integers:
        """The stage of every node in a chain of down-sets, from the empty one to the whole."""
        return np.asarray(np.argmax(self.member[:, list(chain[1:])], axis=1))

    def largest(self, cost: Floats) -> Floats:
        """For every down-set, the dearest node in it."""
        largest = np.zeros(self.size)
        for node in range(self.graph.size):
            np.maximum(largest, np.where(self.member[node], cost[node], 0.0), out=largest)
        return largest

    def allowed(self, boundary: int) -> Booleans:
        """The down-sets that may hold just a number of first stages, as the constraints say."""
        known = self._allowed.get(boundary)
        if known is None:
            known = np.ones(self.size, dtype=np.bool_)
            pairs = zip(self.graph.first_stage, self.graph.last_stage, strict=True)
            for node, (first, last) in enumerate(pairs):
                if last < boundary:
                    known &= self.member[node]
                if first >= boundary:
                    known &= ~self.member[node]
            self._allowed[boundary] = known
        return known


def _inside(graph: Contracted, member: Booleans) -> Floats:
    """Of every kind, and of one that is as fast as the fastest at every node."""
    seconds = graph.with_fastest()
    rows = seconds.reshape(-1, graph.size)
    columns = np.empty((len(rows), member.shape[1]))
    for index, row in enumerate(rows):
        columns[index] = _products(member.T, row)
    return columns.reshape(-1, 3, member.shape[1])


def _products(rows: Booleans, weights: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The sums of the weights of every row, without a copy of the whole table."""
    found = np.zeros(len(rows), dtype=weights.dtype)
    for begin in range(0, len(rows), 4096):
        found[begin : begin + 4096] = rows[begin : begin + 4096].astype(weights.dtype) @ weights
    return found


def _columns(kept: Resident) -> tuple[float, float, float]:
    return kept.bytes, kept.microbatch_bytes, kept.updated_bytes


def _key(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def bits(masks: Sequence[int], size: int) -> Booleans:
    width = (size + 7) // 8
    raw = b"".join(mask.to_bytes(width, "little") for mask in masks)
    table = np.frombuffer(raw, dtype=np.uint8).reshape(len(masks), width)
    return np.unpackbits(table, axis=1, bitorder="little", count=size).astype(np.bool_)


# --- stages between down-sets: rows of them, and blocks of rows -----------------------------------


BLOCK = 100_000
"""Pairs, or extensions of labels, that are worked out at once; bounds memory, not the result."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """The stages that begin at one down-set.

    Attributes:
        ends: the down-sets that they end at, ascending.
        times: shape (7, ends): seconds of a micro-batch forward, backward, receiving, sending
            gradients back, for the weights' gradients; of the update; and at least, of sending
            what others need and receiving its gradients.
        held: shape (3, ends): bytes for good, of a micro-batch as input, and as saved.
    """

    ends: Integers
    times: Floats
    held: Floats


@dataclass(frozen=True, slots=True)
class Pairs:
    """All stages that begin at one of several down-sets, those of each together, ascending.

    Attributes:
        start, end: the down-sets that they lie between.
        times, held: as in `StageRow`.
    """

    start: Integers
    end: Integers
    times: Floats
    held: Floats


def stacked(row: Callable[[int], StageRow], starts: Integers) -> Iterator[Pairs]:
    """The stages that begin at these down-sets, some `BLOCK` at a time: numpy takes few large
    arrays sooner than many small ones."""
    rows: list[StageRow] = []
    first = held = 0
    for place, start in enumerate(starts.tolist(), 1):
        rows.append(row(start))
        held += len(rows[-1].ends)
        if held >= BLOCK or place == len(starts):
            yield Pairs(
                np.repeat(starts[first:place], [len(row.ends) for row in rows]),
                np.concatenate([row.ends for row in rows]),
                np.concatenate([row.times for row in rows], axis=1),
                np.concatenate([row.held for row in rows], axis=1),
            )
            rows, first, held = [], place, 0
