"""ZBV: two stages a device, placed as a V, so that the first backward follows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import Compute, Orders, Phase
from .placement import check_microbatches, shown, stages_of


def zbv(placement: Sequence[int], microbatches: int) -> Orders:
    """Down the devices and up again, so that the first micro-batch comes back where it came in.

    Backwards are split, and gradients of parameters fill the end (Qi et al., arXiv 2405.15362,
    section 3.2). From 2D - 1 micro-batches on, D devices never wait between their first action and
    their last one where forward and both parts of backward take equally long, and none holds more
    activations than the first device of 1F1B. Four stages on two devices, three micro-batches:

        device 0 | 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
        device 1 | .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2

    With fewer than 2D - 1 micro-batches there are gaps where the others would have been.

    Args:
        placement: the device of each stage: 0, 1, ... D - 1, D - 1, ... 1, 0.

    Raises:
        ValueError: for any other placement, or without micro-batches.
    """
    check_microbatches(microbatches)
    devices = len(stages_of(placement))
    row = list(range(devices))
    if list(placement) != [*row, *reversed(row)]:
        raise ValueError(
            f"placement {shown(placement)}: zbv has two stages a device, down and up again: "
            "0, 1, ... 1, 0"
        )
    return tuple(tuple(_device(device, devices, microbatches)) for device in row)


def _device(device: int, devices: int, microbatches: int) -> Iterator[Compute]:
    """Every kind of work counts its micro-batches up by itself."""
    down, up = device, 2 * devices - 1 - device
    down_f, down_b, down_w = ((down, phase) for phase in Phase)
    up_f, up_b, up_w = ((up, phase) for phase in Phase)
    come_back = 2 * devices - 1  # micro-batches under way when the first one has come back
    planned = max(microbatches, come_back)
    plan = (
        (come_back - 2 * device, (down_f,)),
        (device, (up_f, down_f)),
        (devices - device, (up_f, up_b, up_w)),
        (planned - come_back + device, (down_f, down_b, down_w, up_f, up_b, up_w)),
        (devices - 1 - device, (down_b, down_w, up_f, up_b, up_w)),
        (device, (down_b, up_b)),
        (devices - device, (down_b, down_w)),
        (device, (up_w,)),
        (device, (down_w,)),
    )
    following = dict.fromkeys((down_f, down_b, down_w, up_f, up_b, up_w), 0)
    for times, kinds in plan:
        for _ in range(times):
            for kind in kinds:
                number = following[kind]
                following[kind] = number + 1
                if number < microbatches:
                    yield Compute(*kind, number)
