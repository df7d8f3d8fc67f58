"""Stages between two down-sets, many at once: rows of them, and blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpipe_compiler.passes.cut.device_order import StageRates

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

BLOCK = 100_000
"""Pairs, or extensions of labels, that are worked out at once; bounds memory, not the result."""

MOST_BLOCKS = 10
"""Blocks of pairs that are kept (some 100 bytes a pair)."""

MOST_BLOCKED = 2_000
"""Down-sets of families whose pairs are put into blocks once, and not as they are asked for."""


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


class StackedRows:
    """The rows of a family put together, which takes numpy far fewer calls than row by row.

    Args:
        row: of a down-set, as far as stages are not too long.
    """

    def __init__(self, row: Callable[[int, StageRates], StageRow]) -> None:
        self._row = row
        self._known: dict[StageRates, list[Pairs]] = {}
        self._unkept: set[StageRates] = set()  # those with too many pairs

    def clear(self) -> None:
        """Forgets all, as rows have become shorter."""
        self._known.clear()
        self._unkept.clear()

    def of(self, pace: StageRates, starts: Integers, size: int) -> Iterator[Pairs]:
        """The stages that begin at these down-sets, and maybe others, some `BLOCK` at a time.

        Args:
            size: of the family.
        """
        known = self._known.get(pace)
        if known is None:
            if size > MOST_BLOCKED or pace in self._unkept:
                yield from self._together(pace, starts.tolist())
                return
            known = []
            for block in self._together(pace, range(size)):
                known.append(block)
                if len(known) > MOST_BLOCKS:
                    self._unkept.add(pace)
                    yield from self._together(pace, starts.tolist())
                    return
            self._known[pace] = known
        yield from known

    def _together(self, pace: StageRates, starts: Sequence[int]) -> Iterator[Pairs]:
        """The rows of these down-sets."""
        rows: list[StageRow] = []
        first = held = 0
        for place, start in enumerate(starts, 1):
            rows.append(self._row(start, pace))
            held += len(rows[-1].ends)
            if held >= BLOCK or place == len(starts):
                yield Pairs(
                    np.repeat(starts[first:place], [len(row.ends) for row in rows]),
                    np.concatenate([row.ends for row in rows]),
                    np.concatenate([row.times for row in rows], axis=1),
                    np.concatenate([row.held for row in rows], axis=1),
                )
                rows, first, held = [], place, 0
