"""Interleaved 1F1B: several stages a device, dealt round (Narayanan et al., arXiv 2104.04473)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .actions import Compute, Orders, Phase
from .placement import check_microbatches, shown, stages_of


def interleaved(placement: Sequence[int], microbatches: int) -> Orders:
    """1F1B over stages that go round the devices, so that the pipeline fills faster.

    With v stages a device the bubble is a v-th of that of 1F1B, for more activations held and v
    times the transfers (section 2.2 of the article). Four stages on two devices, four
    micro-batches:

        device 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        device 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    Micro-batches go in groups: a device takes a group through its first stage, then through its
    second, and so on, backward the same way from the last. The article has groups of as many
    micro-batches as there are devices. Where that does not come out even, groups here are a little
    larger instead (never smaller, which would stall the devices), so the bubble is the same for any
    number of micro-batches from the number of devices up.

    Args:
        placement: the device of each stage, stage s of D devices on s % D, two or more on each.

    Raises:
        ValueError: for any other placement, or without micro-batches.
    """
    check_microbatches(microbatches)
    held = stages_of(placement)
    devices, per_device = len(held), len(held[0])
    dealt = [stage % devices for stage in range(devices * per_device)]
    if per_device < 2 or list(placement) != dealt:
        raise ValueError(
            f"placement {shown(placement)}: interleaved deals stages round the devices, at least "
            "two to each"
        )
    groups = _groups(microbatches, devices)
    lead = (per_device - 1) * max(map(len, groups))
    return tuple(
        tuple(_device(stages, groups, lead + 2 * (devices - 1 - device)))
        for device, stages in enumerate(held)
    )


def _groups(microbatches: int, devices: int) -> list[range]:
    """Micro-batches in groups as equal as can be, none smaller than the number of devices."""
    count = max(1, microbatches // devices)
    starts = [index * microbatches // count for index in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _device(stages: Sequence[int], groups: Sequence[range], warm_up: int) -> Iterator[Compute]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards left."""
    forward = [Compute(s, Phase.FORWARD, m) for group in groups for s in stages for m in group]
    backward = [
        Compute(s, Phase.BACKWARD, m) for group in groups for s in reversed(stages) for m in group
    ]
    yield from forward[:warm_up]
    for position, action in enumerate(backward):
        yield from forward[warm_up + position : warm_up + position + 1]
        yield action
