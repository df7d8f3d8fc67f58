"""Which of several labels are worth keeping: those that no other equals or betters everywhere."""

from __future__ import annotations

import numpy as np

from gpipe_compiler.passes.cut.space import Booleans, Floats, Integers

TOLERANCE = 1e-10
"""Relative: cuts closer together than this count as equally good."""

BLOCK = 100_000
"""Extensions of labels that are worked out at once; bounds memory, not the result."""

GLANCE = 8
"""Entries of two labels that are compared before all are."""

ABREAST = 32
"""Labels at most that are compared with all others at once."""


def undominated(labels: Floats, group: Integers) -> Integers:
    """Those of a group of labels that none of its others equals or betters everywhere.

    Args:
        labels: a label a row.
        group: some of them; the answer is a part of it.
    """
    labels = labels[group]
    if labels.shape[1] == 2:
        return np.sort(group[_staircase(labels)])
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


def _staircase(labels: Floats) -> Integers:
    """The same for labels of two numbers: in ascending order of one, the other must descend."""
    order = np.lexsort((labels[:, 1], labels[:, 0]))
    second = labels[order, 1]
    least = np.minimum.accumulate(second)
    lower = second[1:] < least[:-1]
    return np.asarray(order[np.concatenate(([True], lower))])
