"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Compute, Orders, Phase
from .placement import check_microbatches, stages_of


def gpipe(placement: Sequence[int], microbatches: int) -> Orders:
    """Every micro-batch forward, then every micro-batch backward in reverse order.

    The last micro-batch comes back first because its activations are the freshest. All
    micro-batches are in flight at once. Three stages on three devices, three micro-batches, with
    forward and backward taking one unit of time each:

        device 0 | F0 F1 F2 .  .  .  .  B2 B1 B0
        device 1 | .  F0 F1 F2 .  .  B2 B1 B0
        device 2 | .  .  F0 F1 F2 B2 B1 B0

    A device with several stages takes each micro-batch through all of them at a time.

    Args:
        placement: the device of each stage; a device holds consecutive stages.

    Raises:
        ValueError: for a placement or a number of micro-batches that makes no sense.
    """
    check_microbatches(microbatches)
    return tuple(
        (
            *(Compute(s, Phase.FORWARD, m) for m in range(microbatches) for s in stages),
            *(
                Compute(s, Phase.BACKWARD, m)
                for m in reversed(range(microbatches))
                for s in reversed(stages)
            ),
        )
        for stages in stages_of(placement)
    )
