"""Which backwards wait while their device works on another micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

from .actions import Compute, Phase


def waiting(order: Iterable[Compute]) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs between whose forward and backward another micro-batch comes.

    What autograd saves for the other pairs is never held beside that of a second micro-batch, on
    any stage of the device, so rematerialisation would cost them time and save nothing. In GPipe's
    schedule the last micro-batch does not wait, on any stage (torchgpipe's `except_last`); in
    1F1B's none waits on the last device.

    Args:
        order: the actions of one device; a pair without a backward waits for nothing.
    """
    started: dict[tuple[int, int], int] = {}
    newest = -1  # the micro-batch of the latest action
    last_of_others = -1  # position of the latest action of any other micro-batch
    found = set()
    for position, action in enumerate(order):
        if action.microbatch != newest:
            newest, last_of_others = action.microbatch, position - 1
        pair = action.stage, action.microbatch
        if action.phase is Phase.FORWARD:
            started[pair] = position
        elif last_of_others > started.get(pair, position):
            found.add(pair)
    return frozenset(found)
