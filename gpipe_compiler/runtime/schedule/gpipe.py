"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .actions import Compute, Orders, Phase
from .placement import check_microbatches, consecutive_stages_of, runs_of, stages_of


def gpipe(placement: Sequence[int], microbatches: int, joint: Collection[int] = ()) -> Orders:
    """Every micro-batch forward, then every micro-batch backward in reverse order.

    The last micro-batch comes back first because its activations are the freshest. All
    micro-batches are in flight at once. Three stages on three devices, three micro-batches, with
    forward and backward taking one unit of time each:

        device 0 | F0 F1 F2 .  .  .  .  B2 B1 B0
        device 1 | .  F0 F1 F2 .  .  B2 B1 B0
        device 2 | .  .  F0 F1 F2 B2 B1 B0

    A device with several stages takes each micro-batch through all of them at a time, those that
    are joint apart.

    Args:
        placement: the device of each stage; a device holds consecutive stages.

    Raises:
        ValueError: for a placement or a number of micro-batches that makes no sense.
    """
    check_microbatches(microbatches)
    orders = []
    for stages in consecutive_stages_of(placement):
        forward = _forwards(stages, microbatches, joint)
        backward = [
            Compute(action.stage, Phase.BACKWARD, action.microbatch) for action in reversed(forward)
        ]
        orders.append((*forward, *backward))
    return tuple(orders)


def forward_only(
    placement: Sequence[int], microbatches: int, joint: Collection[int] = ()
) -> Orders:
    """Every micro-batch forward, in order. Three stages on three devices, three micro-batches:

        device 0 | F0 F1 F2
        device 1 | .  F0 F1 F2
        device 2 | .  .  F0 F1 F2

    A device with several stages takes each micro-batch through all of them at a time, those that
    are joint apart. Where its stages do not follow each other, it takes what would come first if
    every stage took one unit of time.

    Raises:
        ValueError: for a placement or a number of micro-batches that makes no sense.
    """
    check_microbatches(microbatches)
    if joint:
        held = consecutive_stages_of(placement)
        return tuple(_forwards(stages, microbatches, joint) for stages in held)
    held = stages_of(placement)
    pace = max(map(len, held))
    return tuple(_in_order_of_coming(stages, microbatches, pace) for stages in held)


def _forwards(
    stages: Sequence[int], microbatches: int, joint: Collection[int]
) -> tuple[Compute, ...]:
    runs, numbers = runs_of(stages, joint), range(microbatches)
    return tuple(Compute(s, Phase.FORWARD, m) for run in runs for m in numbers for s in run)


def _in_order_of_coming(stages: Sequence[int], microbatches: int, pace: int) -> tuple[Compute, ...]:
    """A device's actions, where micro-batch m reaches stage s at time m * pace + s.

    Over all devices that is one order in which every micro-batch goes from stage to stage, so no
    device waits for another one's later action.
    """
    work = ((s, m) for m in range(microbatches) for s in stages)
    ordered = sorted(work, key=lambda item: (item[1] * pace + item[0], item[0]))
    return tuple(Compute(s, Phase.FORWARD, m) for s, m in ordered)
