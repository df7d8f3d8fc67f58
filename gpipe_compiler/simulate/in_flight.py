"""How many micro-batches every device holds at a time, and the memory of these.

A stage holds of a micro-batch all that autograd saves (`saved`), from its forward to the last part
of its backward. A stage that recomputes holds what it received (`input`) instead, of every
micro-batch whose backward waits, and `saved` of the one whose backward is under way. One that
recomputes in segments does so for every micro-batch: in place of `input` it holds what the segments
leave, and in place of `saved` what it has besides, at most, while a backward is under way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.schedule.joint import waiting

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """What a device holds of micro-batches while it works.

    Attributes:
        counts: shape (moments, stages, 2): of how many micro-batches each stage holds `input`, and
            of how many `saved`. Moments at which another one holds no less of anything are left
            out.
    """

    stages: tuple[int, ...]
    counts: Counts

    def peak(self, input_bytes: Sequence[float], saved_bytes: Sequence[float]) -> float:
        """Bytes at the worst moment, for what each of `stages` holds of a micro-batch."""
        if not len(self.counts):
            return 0.0
        sizes = np.stack((np.array(input_bytes), np.array(saved_bytes)), axis=1)
        return float((self.counts * sizes).sum(axis=(1, 2)).max())

    def of(self, stage: int) -> Load:
        """That of one of its stages alone."""
        index = self.stages.index(stage)
        return Load((stage,), _undominated(self.counts[:, index : index + 1]))


def loads(
    orders: Orders,
    recompute: Collection[int] = (),
    joint: Collection[int] = (),
    segmented: Collection[int] = (),
) -> tuple[Load, ...]:
    """That of every device.

    In inference a stage holds one micro-batch at a time.

    Args:
        recompute: the stages that run their forward again before a backward.
        joint: the stages that take all micro-batches as one, and have all of them whole.
        segmented: the stages that recompute in segments.
    """
    moments = (held(order, recompute, joint, segmented) for order in orders)
    return tuple(Load(load.stages, _undominated(load.counts)) for load in moments)


def held(
    order: Sequence[Compute],
    recompute: Collection[int] = (),
    joint: Collection[int] = (),
    segmented: Collection[int] = (),
    waits: Collection[tuple[int, int]] | None = None,
) -> Load:
    """What a device holds at every action of its order but second parts of backwards.

    Args as those of `loads`; the moments are the same ones whatever they are.
        waits: `waiting` of the order, where it is known.
    """
    recompute = frozenset(recompute) - frozenset(joint)
    stages = tuple(sorted({action.stage for action in order}))
    index = {stage: position for position, stage in enumerate(stages)}
    split = {action.stage for action in order if action.phase is Phase.WEIGHT}
    trained = {action.stage for action in order if action.phase is Phase.BACKWARD}
    waits = waiting(order, joint) if waits is None else waits
    now = [0] * (2 * len(stages))  # of each stage `input` and `saved`
    moments = []
    begun: set[int] = set()
    for action in order:
        place = 2 * index[action.stage]
        waited = action.stage in recompute and (action.stage, action.microbatch) in waits
        again = waited or action.stage in segmented
        if action.phase is Phase.FORWARD:
            now[place if again else place + 1] += 1
        elif action.phase is Phase.BACKWARD and again and action.stage not in begun:
            # A joint stage has one backward, of all its micro-batches.
            whole = action.stage in joint
            now[place + 1] += now[place] if whole else 1
            begun.update({action.stage} if whole else ())
        if action.phase is not Phase.WEIGHT:
            moments.append(tuple(now))
        ends = Phase.WEIGHT if action.stage in split else Phase.BACKWARD
        if action.stage not in trained:
            ends = Phase.FORWARD
        if action.phase is ends:
            now[place + 1] -= 1
            if again:
                now[place] -= 1
    return Load(stages, np.array(moments, dtype=np.int64).reshape(-1, len(stages), 2))


def _undominated(counts: Counts) -> Counts:
    """The moments at which no other one holds as much of everything, and more of something."""
    rows = counts.reshape(len(counts), -1)
    flat = rows[np.unique(rows, axis=0, return_index=True)[1]]  # without it, imports masked arrays
    order = np.argsort(-flat.sum(axis=1), kind="stable")
    kept: list[npt.NDArray[np.int64]] = []
    for row in flat[order]:
        if not any((row <= other).all() for other in kept):
            kept.append(row)
    return np.array(kept, dtype=np.int64).reshape(-1, *counts.shape[1:])
