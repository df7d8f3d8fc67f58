"""1F1B: after a warm-up, one forward and one backward in turn; and ZB-H1, its split form."""

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
    return _orders(placement, microbatches, split=False)


def zb_h1(placement: Sequence[int], microbatches: int) -> Orders:
    """1F1B in which device i puts off making the gradients of parameters by i micro-batches.

    Gradients travel back sooner, and what was put off fills the end, where 1F1B has its bubble (Qi
    et al., arXiv 2401.10241, section 3.1). Every device holds as many micro-batches as the first
    one does, at most. Three stages on three devices, four micro-batches:

        device 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        device 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        device 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Fewer micro-batches than devices only shorten the warm-up. A device with several stages takes
    each micro-batch through all of them at a time.

    Args:
        placement: the device of each stage; a device holds consecutive stages.

    Raises:
        ValueError: for a placement or a number of micro-batches that makes no sense.
    """
    return _orders(placement, microbatches, split=True)


def _orders(placement: Sequence[int], microbatches: int, *, split: bool) -> Orders:
    check_microbatches(microbatches)
    held = consecutive_stages_of(placement)
    return tuple(
        tuple(_device(stages, device, len(held), microbatches, split=split))
        for device, stages in enumerate(held)
    )


def _device(
    stages: Sequence[int], device: int, devices: int, microbatches: int, *, split: bool
) -> Iterator[Compute]:
    back = stages[::-1]
    warm_up = min(devices - device, microbatches)
    for m in range(warm_up):
        yield from _each(stages, Phase.FORWARD, m)
    for m in range(microbatches):
        yield from _each(back, Phase.BACKWARD, m)
        if split and m >= device:
            yield from _each(back, Phase.WEIGHT, m - device)
        if warm_up + m < microbatches:
            yield from _each(stages, Phase.FORWARD, warm_up + m)
    for m in range(max(0, microbatches - device), microbatches) if split else ():
        yield from _each(back, Phase.WEIGHT, m)


def _each(stages: Sequence[int], phase: Phase, microbatch: int) -> Iterator[Compute]:
    return (Compute(stage, phase, microbatch) for stage in stages)
