"""Which backwards wait while their device goes on with another micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

from .actions import Compute, Phase

_NONE = -1


def waiting(order: Iterable[Compute]) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs that another micro-batch overtakes on their device.

    Those are the pairs between whose forward and backward the device runs a forward of another
    micro-batch. What the other pairs keep for their backward is never held beside the activations
    of a later forward, so rematerialisation would cost time and save nothing. In GPipe's schedule
    the last micro-batch does not wait, on any stage (torchgpipe's `except_last`); in 1F1B's no
    micro-batch waits on the last device.

    Args:
        order: the actions of one device; a pair without a backward waits for nothing.
    """
    started: dict[tuple[int, int], int] = {}
    latest, latest_position = _NONE, _NONE
    other_position = _NONE  # of the latest forward of a micro-batch that is not `latest`
    found = set()
    for position, action in enumerate(order):
        pair = action.stage, action.microbatch
        if action.phase is Phase.FORWARD:
            started[pair] = position
            if action.microbatch != latest:
                latest, other_position = action.microbatch, latest_position
            latest_position = position
            continue
        overtaken = other_position if action.microbatch == latest else latest_position
        if overtaken > started[pair]:
            found.add(pair)
    return frozenset(found)
