"""The parts of a device's program that repeat, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.runtime.core.wiring import ActionStep
from gpipe_compiler.runtime.schedule.actions import Compute, SharedSum

_FEWEST = 4
"""The fewest cycles for which comparing them pays."""


@dataclass(frozen=True, slots=True)
class Cycles:
    """Steps that come again, each time on micro-batches that are further by as many.

    Attributes:
        start: the place of the first step.
        period: steps of a cycle.
        shift: by how many micro-batches each cycle is further than the one before it.
        count: of cycles.
    """

    start: int
    period: int
    shift: int
    count: int


def cycles_of(steps: Sequence[ActionStep]) -> tuple[Cycles, ...]:
    """The repeating parts of a program, in order; they do not overlap."""
    if not steps:
        return ()
    kinds: dict[Hashable, int] = {}
    rows = [_row(step) for step in steps]
    kind = np.array([kinds.setdefault(key, len(kinds)) for key, _ in rows])
    number = np.array([m for _, m in rows])
    # For each step, how far off the next of its kind is, and on which micro-batch.
    places = np.argsort(kind, kind="stable")
    same = kind[places[1:]] == kind[places[:-1]]
    here, there = places[:-1][same], places[1:][same]
    gap, shift = np.zeros(len(steps), int), np.zeros(len(steps), int)
    gap[here], shift[here] = there - here, number[there] - number[here]
    changes = np.flatnonzero((np.diff(gap) != 0) | (np.diff(shift) != 0)) + 1
    found = []
    free = 0
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(steps)], strict=True):
        period, by = int(gap[begin]), int(shift[begin])
        start = max(begin, free)
        if period == 0 or by < 1 or end - start < period:
            continue
        count = (end - start) // period + 1  # the last one has no next
        if count >= _FEWEST:
            found.append(Cycles(start, period, by, count))
            free = start + period * count
    return tuple(found)


def _row(step: ActionStep) -> tuple[Hashable, int]:
    """All of a step but its micro-batch, and that."""
    action = step.action
    what: Hashable
    if isinstance(action, Compute):
        m = action.microbatch
        what = action.stage, action.phase, step.waits
    elif isinstance(action, SharedSum):
        return action, 0
    else:
        transfer = action.transfer
        m = transfer.microbatch
        ends = transfer.source, transfer.target
        what = type(action), transfer.value, ends, transfer.gradient
    drops = step.drops
    if not drops:
        return what, m
    if len(drops) == 1:
        return (what, drops[0][0], drops[0][1] - m), m
    return (what, tuple([(name, drop - m) for name, drop in drops])), m
