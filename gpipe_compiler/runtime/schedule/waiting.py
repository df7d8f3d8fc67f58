"""Which backwards wait while their device works on another micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .actions import Compute, Phase


def waiting(order: Iterable[Compute], joint: Collection[int] = ()) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs between whose forward and backward another micro-batch comes.

    What autograd saves for the other pairs is never held beside that of a second micro-batch, on
    any stage of the device, so rematerialisation would cost them time and save nothing. In GPipe's
    schedule the last micro-batch does not wait, on any stage (torchgpipe's `except_last`); in
    1F1B's none waits on the last device. A second part of the backward, later on, changes nothing:
    what is made again before the first part is held until the second. The micro-batches of a joint
    stage are one, other than those of any other stage: it does not wait where its backward follows
    its forward.

    Args:
        order: the actions of one device; a pair without a backward waits for nothing.
        joint: the stages that take all micro-batches as one (`together.Joint`).
    """
    started: dict[tuple[int, int], int] = {}
    newest: int | None = None  # the latest action's micro-batch; below 0 those of a joint stage
    last_of_others = -1  # position of the latest action of any other micro-batch
    found = set()
    for position, action in enumerate(order):
        work = -1 - action.stage if action.stage in joint else action.microbatch
        if work != newest:
            newest, last_of_others = work, position - 1
        if action.phase is Phase.FORWARD:
            started[action.stage, work] = position
        elif action.phase is Phase.WEIGHT:
            continue
        elif last_of_others > started.get((action.stage, work), position):
            found.add((action.stage, action.microbatch))
    return frozenset(found)
