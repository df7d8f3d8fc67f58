"""1F1B: after a warm-up, one forward and one backward in turn (PipeDream-Flush)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import Compute, Orders, Phase
from .placement import check_microbatches, consecutive_stages_of


def one_f_one_b(placement: Sequence[int], microbatches: int) -> Orders:
    """Forwards until the first micro-batch can come back, then backward and forward in turn.

    It takes as long as GPipe, but device i of D holds the activations of D - i micro-batches at
    most. Three stages on three devices, four micro-batches, one unit of time each:

        device 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        device 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        device 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3

    Fewer micro-batches than devices only shorten the warm-up. A device with several stages takes
    each micro-batch through all of them at a time.

    Args:
        placement: the device of each stage; a device holds consecutive stages.

    Raises:
        ValueError: for a placement or a number of micro-batches that makes no sense.
    """
    check_microbatches(microbatches)
    held = consecutive_stages_of(placement)
    return tuple(
        tuple(_device(stages, len(held) - device, microbatches))
        for device, stages in enumerate(held)
    )


def _device(stages: Sequence[int], in_flight: int, microbatches: int) -> Iterator[Compute]:
    warm_up = min(in_flight, microbatches)
    for m in range(warm_up):
        yield from _forward(stages, m)
    for m in range(microbatches):
        yield from _backward(stages, m)
        if warm_up + m < microbatches:
            yield from _forward(stages, warm_up + m)


def _forward(stages: Sequence[int], microbatch: int) -> Iterator[Compute]:
    return (Compute(stage, Phase.FORWARD, microbatch) for stage in stages)


def _backward(stages: Sequence[int], microbatch: int) -> Iterator[Compute]:
    return (Compute(stage, Phase.BACKWARD, microbatch) for stage in reversed(stages))
