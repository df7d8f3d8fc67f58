"""Families of down-sets of a contracted problem, and what a stage between two of them costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpipe_compiler.passes.cut_contract import Contracted
from gpipe_compiler.passes.cut_problem import GRAPH_INPUT

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

CACHED_PAIRS = 4_000_000
"""Pairs of down-sets whose costs are kept (20 bytes each); further ones are worked out anew."""


def down_sets(graph: Contracted, limit: int) -> list[int] | None:
    """Every place to cut, as bit masks; None when there are more than `limit`.

    They are the sets closed under predecessors and without the pinned node, and the whole set.
    """
    free = graph.size - graph.last
    before = [sum(1 << node for node in nodes) for nodes in graph.before]
    after: list[list[int]] = [[] for _ in range(graph.size)]
    for node, nodes in enumerate(graph.before):
        for source in nodes:
            after[source].append(node)
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


@dataclass(frozen=True, slots=True)
class Row:
    """The stages that begin at one down-set: where they end, and their seconds per micro-batch."""

    ends: Integers
    receive_s: Floats
    gradient_s: Floats


class Space:
    """A family of down-sets, ordered so that a set comes after all its subsets.

    Index 0 is the empty set, the last index the whole graph.

    Attributes:
        masks: the down-sets.
        forward_s, backward_s: computing inside each down-set.
    """

    def __init__(self, graph: Contracted, masks: Iterable[int]) -> None:
        self.graph = graph
        whole = (1 << graph.size) - 1
        pinned = 1 << (graph.size - 1) if graph.last else 0
        forbidden = whole ^ pinned if graph.last and not graph.last_alone else whole
        chosen = {m for m in masks if not m & pinned and m != forbidden} | {0, whole}
        member = _bits(list(chosen), graph.size)
        forward = np.array(graph.forward_s)
        backward = np.array(graph.backward_s)
        # Integer sums are exact, so that no set sorts before its subset.
        scale = float(forward.sum() + backward.sum()) or 1.0
        weights = np.rint((forward + backward) / scale * 2**40).astype(np.int64)
        work = member.astype(np.int64) @ weights
        order = np.lexsort((np.array(list(map(_key, chosen))), member.sum(axis=1), work))
        unsorted = list(chosen)
        self.masks = [unsorted[i] for i in order]
        self._work = work[order]
        self._scale = scale / 2**40
        self.member: Booleans = np.ascontiguousarray(member[order].T)
        self.forward_s: Floats = forward @ self.member
        self.backward_s: Floats = backward @ self.member
        self.size = len(self.masks)
        self.limit_s = float("inf")
        self._edges()
        self._cache: dict[int, Row] = {}
        self._cached = 0

    def _edges(self) -> None:
        """For every down-set, its maximal nodes and the values that lie across its border."""
        followed = np.zeros_like(self.member)
        for node, before in enumerate(self.graph.before):
            for source in before:
                followed[source] |= self.member[node]
        self._maximal = np.ascontiguousarray((self.member & ~followed).T)
        live = np.zeros((len(self.graph.values), self.size), dtype=np.bool_)
        for index, value in enumerate(self.graph.values):
            made = np.ones(self.size, dtype=np.bool_)
            made[0] = False
            if value.producer != GRAPH_INPUT:
                made = self.member[value.producer]
            live[index] = made & ~np.logical_and.reduce(self.member[list(value.consumers)])
        self._live = np.ascontiguousarray(live.T)

    def limit(self, seconds: float) -> None:
        """From now on leave out stages that compute for longer than this."""
        if seconds < self.limit_s:
            self.limit_s = seconds
            self._cache.clear()
            self._cached = 0

    def row(self, start: int) -> Row:
        """All stages that begin at the down-set of this index."""
        row = self._cache.get(start)
        if row is None:
            row = self._row(start)
            if self._cached + len(row.ends) <= CACHED_PAIRS:
                self._cache[start] = row
                self._cached += len(row.ends)
        return row

    def _row(self, start: int) -> Row:
        stop = self.size
        if np.isfinite(self.limit_s):
            most = self._work[start] + int(self.limit_s / self._scale * (1 + 1e-9)) + self.size + 1
            stop = int(np.searchsorted(self._work, most, side="right"))
        window = slice(start + 1, stop)
        fits = np.ones(max(stop - start - 1, 0), dtype=np.bool_)
        for node in np.flatnonzero(self._maximal[start]):
            fits &= self.member[node, window]
        receive = np.zeros(len(fits))
        gradient = np.zeros(len(fits))
        inside = self.member[:, start]
        for index in np.flatnonzero(self._live[start]):
            value = self.graph.values[index]
            used: Booleans | None = None
            for consumer in value.consumers:
                if not inside[consumer]:
                    has = self.member[consumer, window]
                    used = has if used is None else used | has
            assert used is not None  # a live value has a consumer outside
            receive += used * value.receive_s
            if value.gradient_s:
                gradient += used * value.gradient_s
        chosen = np.flatnonzero(fits)
        return Row(chosen + start + 1, receive[chosen], gradient[chosen])


def _key(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _bits(masks: Sequence[int], size: int) -> Booleans:
    """One row of booleans per mask."""
    width = (size + 7) // 8
    raw = b"".join(mask.to_bytes(width, "little") for mask in masks)
    table = np.frombuffer(raw, dtype=np.uint8).reshape(len(masks), width)
    return np.unpackbits(table, axis=1, bitorder="little", count=size).astype(np.bool_)
