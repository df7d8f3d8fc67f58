"""The actions of a schedule by number, in an order in which their times can be worked out.

What is known of an action stands in a list at its number: schedules of large pipelines have
millions of actions, and looking each of them up by itself takes longer than the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.errors import PlanError
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.schedule.together import Joint

NOTHING = -1
"""The number of the action that one waits for which waits for none."""

PLACES = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.WEIGHT: 2}


@dataclass(frozen=True, slots=True)
class Numbers:
    """A number for every action there can be.

    Stages stand in a line: an action waits for what its neighbour makes of the same micro-batch.
    """

    stages: int
    microbatches: int

    @classmethod
    def of_all(cls, orders: Orders) -> Numbers:
        """Those of the actions of a schedule."""
        stages = max((action.stage for order in orders for action in order), default=-1)
        last = max((action.microbatch for order in orders for action in order), default=-1)
        return cls(stages + 1, last + 1)

    @property
    def size(self) -> int:
        """All numbers are below it."""
        return len(PLACES) * self.stages * self.microbatches

    def of(self, action: Compute) -> int:
        """That of an action."""
        row = len(PLACES) * action.stage + PLACES[action.phase]
        return row * self.microbatches + action.microbatch

    def needed(self, number: int) -> int:
        """That of the action whose result this one waits for."""
        row = number // self.microbatches
        stage, place = divmod(row, len(PLACES))
        if place == 0:
            return number - len(PLACES) * self.microbatches if stage else NOTHING
        if place == 1 and stage < self.stages - 1:
            return number + len(PLACES) * self.microbatches
        return number - self.microbatches  # its own forward, or the first part of its backward


def sequence(orders: Orders, joint: Joint) -> tuple[tuple[int, Compute, int], ...]:
    """All (device, action, number), every action after those it waits for.

    Raises:
        PlanError: when some device would wait for ever, or an action is missing.
    """
    numbers = Numbers.of_all(orders)
    done = bytearray(numbers.size)
    programs = [[_step(action, numbers, joint) for action in order] for order in orders]
    position = [0] * len(orders)
    found: list[tuple[int, Compute, int]] = []
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(programs):
            start = place = position[device]
            while place < len(program):
                action, number, needed = program[place]
                if needed != NOTHING and not done[needed]:
                    break
                done[number] = 1
                found.append((device, action, number))
                place += 1
            position[device] = place
            moved = moved or place > start
    if len(found) < sum(map(len, orders)):
        device = next(d for d, order in enumerate(orders) if position[d] < len(order))
        stuck = orders[device][position[device]]
        raise PlanError(f"device {device} would wait for ever before {stuck}")
    return tuple(found)


def _step(action: Compute, numbers: Numbers, joint: Joint) -> tuple[Compute, int, int]:
    """The action, its number, and that of what its device waits for before it."""
    number = numbers.of(action)
    needed = numbers.needed(number)
    if joint.stages and needed != NOTHING:
        row = needed // numbers.microbatches
        stage, place = divmod(row, len(PLACES))
        last = joint.awaited_of(action.stage, stage, list(PLACES)[place])
        if last is not None:
            needed = row * numbers.microbatches + last
    return action, number, needed
