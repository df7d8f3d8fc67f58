"""Stages between two down-sets, many at once: rows of them, and blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

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
