"""Which nodes share a stage in every cut whose longest stage is shorter than a known one.

What a set of nodes would take as a stage is a sum over its nodes and over the values across its
border. So the least that any set takes which has one node and lacks another is a minimum cut of a
network (Picard, Management Science 22(11), 1976), in which a value with several users is an edge of
a hypergraph (Lawler, Networks 3(3), 1973). Let a value go from a to b. If they lie in different
stages, one stage has a and nothing that follows from b, and another has b and nothing that comes
before a; both have all that lies between two of their nodes. Where all such sets with a, or all
with b, take as long as what is known, a and b share a stage. As one node they take longer, so that
more follow. Where that never ends, no cut is better.

This tells much where transfers decide what a stage takes, and nothing where stages can end almost
anywhere. There are no whole numbers in it: a minimum cut of a thousand nodes takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from gpipe_compiler.disjoint import DisjointSets
from gpipe_compiler.passes.cut.best_case import CLOSE, Ideal
from gpipe_compiler.passes.cut.contract import topological
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT

PATIENCE = 100
"""Minimum cuts in a row that join nothing, after which no more are asked for."""

_KNOWN = 1 << 28
"""The capacity that stands for what the known cut takes; networks are of whole numbers."""

_ENDLESS = 1 << 30

Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


def joined(ideal: Ideal) -> Ideal | None:
    """The problem with one owner for nodes that share a stage in all better cuts.

    Cuts are compared by their longest stages, transfers included, on equal links. That not all
    such nodes are found, as only so many minimum cuts are asked for, does no harm.

    Args:
        ideal: in shares of what the known cut takes.

    Returns:
        None where no cut, into any number of stages above one, is better.
    """
    find = DisjointSets(sorted(set(ideal.owner)))
    find.close(ideal.edges)
    ideal = _regrouped(ideal, {node: find.leader(node) for node in set(ideal.owner)})
    joining = _Joining(ideal)
    if not joining.run():
        return None
    nodes = joining.nodes
    return _regrouped(ideal, {node: nodes[joining.root[i]] for i, node in enumerate(nodes)})


def _regrouped(ideal: Ideal, owner: Mapping[int, int]) -> Ideal:
    """The problem with new owners for the old ones."""
    moves = []
    for producer, users, there, back in ideal.moves:
        made = producer if producer == GRAPH_INPUT else owner[producer]
        used = tuple(sorted({owner[user] for user in users} - {made}))
        if used:
            moves.append((made, used, there, back))
    edges = {(owner[a], owner[b]) for a, b in ideal.edges if owner[a] != owner[b]}
    return replace(
        ideal,
        owner=tuple(owner[node] for node in ideal.owner),
        edges=tuple(sorted(edges)),
        moves=tuple(moves),
    )


class _Joining:
    """Nodes that are joined as it becomes known that they must be.

    A set that takes little enough, and has all between its nodes, is a witness: it shows for all
    edges across its border that this end of them may have a stage without the other.

    Attributes:
        nodes: of the problem, in topological order.
        root: of every one, by places in `nodes`, that which stands for all it is joined with.
    """

    def __init__(self, ideal: Ideal) -> None:
        self._network = _Network(ideal)
        self.nodes = self._network.nodes
        size = len(self.nodes)
        self.root = np.arange(size)
        self._edges = self._network.edges
        self._follows = _following(size, self._edges)
        self._witnesses = np.zeros((0, size), dtype=np.bool_)
        self._asked = np.zeros((2, self._edges.shape[1]), dtype=np.bool_)

    def run(self) -> bool:
        """Joins what it can, from the first nodes on and from the last; False where no cut is."""
        for last in (False, True):
            failures = 0
            while failures < PATIENCE:
                waiting = np.argwhere(self._open().T)
                if not len(waiting):
                    return True
                edge, side = waiting[-1 if last else 0].tolist()
                if self._separable(edge, side):
                    failures += 1
                    continue
                failures = 0
                if not self._join(edge):
                    return False
        return True

    def _open(self) -> Booleans:
        """For both ends of every edge, whether more must be known of stages without the other."""
        ends = self.root[self._edges]
        has = self._witnesses[:, ends]
        shown = (has & ~has[:, ::-1]).any(axis=0)
        return np.asarray(~shown & ~self._asked & (ends[0] != ends[1]))

    def _separable(self, edge: int, side: int) -> bool:
        """Whether a set with this end, and without the other, takes less than what is known."""
        inside, outside = self.root[self._edges[:, edge]][:: -1 if side else 1].tolist()
        follows = self._follows
        banned = follows[:, outside] if side else follows[outside]
        found = self._network.least(self.root, inside, banned, follows)
        if found is None:
            return False
        hull = follows[found].any(axis=0) & follows[:, found].any(axis=1)
        if (hull & ~found).any():
            self._asked[side, edge] = True
        else:
            self._witnesses = np.vstack((self._witnesses, found))
        return True

    def _join(self, edge: int) -> bool:
        """Joins both ends, and all between them; False where they take too long together."""
        before, after = self.root[self._edges[:, edge]].tolist()
        follows, root = self._follows, self.root
        together = (root == before) | (root == after) | (follows[before] & follows[:, after])
        root[together] = np.flatnonzero(together)[0]
        later, earlier = follows[together].any(axis=0), follows[:, together].any(axis=1)
        follows[np.ix_(earlier, later)] = True
        inside = self._witnesses[:, together]
        self._witnesses = self._witnesses[inside.all(axis=1) | ~inside.any(axis=1)]
        self._asked[:, together[self._edges].any(axis=0)] = False
        return float(self._network.own[together].sum()) < 1 - CLOSE


class _Network:
    """The network whose minimum cuts are what sets of nodes take at least.

    Beside the nodes it has two places for every value with several users: one is in the set when a
    user is, the other only when all users are.

    Attributes:
        nodes: those of the problem that stand for others, in topological order.
        own: what each of them computes.
        edges: (2, edges), by their places in `nodes`, those of the first nodes first.
    """

    def __init__(self, ideal: Ideal) -> None:
        given = sorted(set(ideal.owner))
        place = {node: index for index, node in enumerate(given)}
        order = topological(len(given), ((place[a], place[b]) for a, b in ideal.edges))
        self.nodes = [given[index] for index in order]
        self.size = len(order)
        place = {node: index for index, node in enumerate(self.nodes)}
        self.own = np.zeros(self.size)
        computing = np.array(ideal.own) + ideal.again * np.array(ideal.forward)
        np.add.at(self.own, [place[node] for node in ideal.owner], computing)
        edges = sorted((place[a], place[b]) for a, b in ideal.edges)
        self.edges = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        arcs = list(_arcs(ideal, place))
        self._arcs = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
        self._places = max(self.size, int(self._arcs[:2].max(initial=-1)) + 1)

    def least(
        self, root: Integers, inside: int, banned: Booleans, follows: Booleans
    ) -> Booleans | None:
        """The set that takes least of those with one node; None where none takes less than known.

        Args:
            root: of every node, the one that it is joined with.
            banned: nodes that are not in the set.
            follows: for every node those that follow from it, itself among them.
        """
        begin, into, out = self._places, self._places + 1, self._places + 2
        where = np.arange(self._places + 3)
        where[: self.size] = root
        where[: self.size][banned] = out
        where[: self.size][root == inside] = into
        before, after = self.edges
        down, up = follows[inside][before], follows[:, inside][after]
        between = np.concatenate((self.edges[::-1, down], self.edges[:, up]), axis=1)
        own = np.minimum(np.bincount(where[: self.size], self.own, out)[:out] * _KNOWN, _ENDLESS)
        working = np.flatnonzero(own)
        arcs = np.concatenate(
            (
                np.concatenate((where[self._arcs[:2]], self._arcs[2:])),
                np.stack((*where[between], np.full(between.shape[1], _ENDLESS))),
                np.stack((working, np.full(len(working), out), own[working].astype(np.int64))),
                np.array([[begin], [into], [_KNOWN]]),
            ),
            axis=1,
        )
        tails, heads, _ = arcs
        arcs = arcs[:, (tails != heads) & (tails != out) & ((heads != into) | (tails == begin))]
        graph, places = _matrix(arcs, out)
        source, sink = np.searchsorted(places, (begin, out)).tolist()
        flow = maximum_flow(graph, source, sink)
        if flow.flow_value >= (1 - CLOSE) * _KNOWN:
            return None
        left = graph - flow.flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = np.zeros(out + 1, dtype=np.bool_)
        reached[places[breadth_first_order(left, source, return_predecessors=False)]] = True
        return np.asarray(reached[where[: self.size]])


def _arcs(ideal: Ideal, place: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """(tail, head, capacity): what a set takes that has the tail and lacks the head."""
    free = len(place)
    for producer, users, there, back in ideal.moves:
        if producer == GRAPH_INPUT:
            continue  # the first stage has it
        cost = min(int((there + back) * _KNOWN), _ENDLESS)
        made = place[producer]
        if len(users) == 1:
            yield place[users[0]], made, cost
            yield made, place[users[0]], cost
            continue
        yield free, made, cost
        yield made, free + 1, cost
        for user in users:
            yield place[user], free, _ENDLESS
            yield free + 1, place[user], _ENDLESS
        free += 2


def _matrix(arcs: Integers, sink: int) -> tuple[csr_array, Integers]:
    """Arcs as a sparse matrix of the places that have any, and these places, ascending.

    Args:
        arcs: rows of tails, heads and capacities.
        sink: the last of all places; it is among those, even without an arc.
    """
    tails, heads, capacity = arcs
    places = np.unique(np.concatenate((tails, heads, [sink])))
    pairs, index = np.unique(tails * (sink + 1) + heads, return_inverse=True)
    total = np.minimum(np.bincount(index, capacity), _ENDLESS).astype(np.int32)
    ends = np.searchsorted(places, np.divmod(pairs, sink + 1))
    return csr_array((total, tuple(ends)), shape=(len(places), len(places))), places


def _following(size: int, edges: Integers) -> Booleans:
    """For every node those that follow from it, itself among them; nodes are in order."""
    found = np.eye(size, dtype=np.bool_)
    for before, after in edges[:, ::-1].T.tolist():
        found[before] |= found[after]
    return found
