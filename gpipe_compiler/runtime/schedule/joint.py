"""Joint stages: those that take all micro-batches of a mini-batch as one piece of work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .actions import Compute, Phase


@dataclass(frozen=True)
class Joint:
    """What the micro-batches of joint stages wait for, beside their own.

    A joint stage has its actions for every micro-batch like any other. Its forwards are one piece
    of work: none starts before what all of them read is there, and what they make is there when the
    last of them has ended. The same holds for its backwards.

    Attributes:
        order: the micro-batches of every stage's forwards, and of its backwards, in the order in
            which its device takes them.
    """

    stages: frozenset[int] = frozenset()
    order: Mapping[tuple[int, Phase], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Collection[int], orders: Iterable[Iterable[Compute]]) -> Joint:
        """What is joint in the compute actions of all devices."""
        found: dict[tuple[int, Phase], list[int]] = {}
        for order in orders if stages else ():
            for action in order:
                found.setdefault((action.stage, action.phase), []).append(action.microbatch)
        return cls(frozenset(stages), {key: tuple(numbers) for key, numbers in found.items()})

    def completed(self, action: Compute) -> tuple[int, ...]:
        """The micro-batches whose work in this stage and phase is done when the action has run.

        Its own; in a joint stage none, and with the last action all.
        """
        if action.stage not in self.stages:
            return (action.microbatch,)
        numbers = self.order[action.stage, action.phase]
        return numbers if numbers[-1] == action.microbatch else ()

    def awaited(self, reader: int, action: Compute) -> Compute:
        """What a stage waits for that reads what `action` makes.

        That action; the last one of its stage and phase, where either stage is joint: a device
        takes them in order.
        """
        last = self.awaited_of(reader, action.stage, action.phase)
        return action if last is None else Compute(action.stage, action.phase, last)

    def awaited_of(self, reader: int, stage: int, phase: Phase) -> int | None:
        """The micro-batch of `awaited` for any action of this stage and phase; None for its own."""
        if reader not in self.stages and stage not in self.stages:
            return None
        numbers = self.order.get((stage, phase))
        return numbers[-1] if numbers else None


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
