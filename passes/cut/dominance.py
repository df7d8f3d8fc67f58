"""Which of several labels are worth keeping: those that no other dominates."""

from __future__ import annotations

import numpy as np

from gpipe_compiler.passes.cut.space import BLOCK, Booleans, Floats, Integers

TOLERANCE = 1e-10
"""Relative: cuts closer together than this count as equally good."""

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
