"""Inference: micro-batches flow through, nothing comes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .actions import Compute, Orders, Phase
from .placement import check_microbatches, runs_of, stages_of


def forward_only(
    placement: Sequence[int], microbatches: int, joint: Collection[int] = ()
) -> Orders:
    """Every micro-batch forward, in order. Three stages on three devices, three micro-batches:

        device 0 | F0 F1 F2
        device 1 | .  F0 F1 F2
        device 2 | .  .  F0 F1 F2

    Args:
        placement: the device of each stage; a device holds consecutive stages.
        joint: the stages that take all micro-batches as one (`together.Joint`).

    Raises:
        ValueError: for a placement or a number of micro-batches that makes no sense.
    """
    check_microbatches(microbatches)
    return tuple(
        tuple(
            Compute(s, Phase.FORWARD, m)
            for run in runs_of(stages, joint)
            for m in range(microbatches)
            for s in run
        )
        for stages in stages_of(placement)
    )
