"""The actions of a schedule by number, in an order in which their times can be worked out.

What is known of an action stands in a list at its number: schedules of large pipelines have
millions of actions, and looking each of them up by itself takes longer than the arithmetic.
"""

from __future__ import annotations

from gpipe_compiler.errors import PlanError
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.schedule.joint import Joint

NOTHING = -1
"""The number of the action that one waits for which waits for none."""

PHASES = tuple(Phase)


class Numbers:
    """A number for every action there can be.

    Stages stand in a line: an action waits for what its neighbour makes of the same micro-batch.

    Attributes:
        size: all numbers are below it.
    """

    def __init__(self, orders: Orders) -> None:
        stages = 1 + max((action.stage for order in orders for action in order), default=-1)
        row = 1 + max((action.microbatch for order in orders for action in order), default=-1)
        self.size = len(PHASES) * stages * row
        self._row = row
        self._first: dict[tuple[int, Phase], tuple[int, int]] = {}
        for stage in range(stages):
            steps = (
                -len(PHASES) * row if stage else 0,
                len(PHASES) * row if stage < stages - 1 else -row,
                -row,
            )
            for place, (phase, step) in enumerate(zip(PHASES, steps, strict=True)):
                self._first[stage, phase] = (len(PHASES) * stage + place) * row, step

    def of(self, action: Compute) -> tuple[int, int]:
        """That of an action, and that of the one whose result it waits for."""
        first, step = self._first[action.stage, action.phase]
        number = first + action.microbatch
        return number, number + step if step else NOTHING

    def awaited(self, action: Compute, joint: Joint) -> int:
        """That of the action which has to end before this one can start."""
        _, needed = self.of(action)
        if needed == NOTHING:
            return NOTHING
        row = needed // self._row
        stage, place = divmod(row, len(PHASES))
        last = joint.awaited_of(action.stage, stage, PHASES[place])
        return needed if last is None else row * self._row + last


def sequence(
    orders: Orders, numbers: Numbers, joint: Joint
) -> tuple[tuple[int, Compute, int, int], ...]:
    """All actions, every one after those it waits for: device, action, and `Numbers.of` it.

    Raises:
        PlanError: when some device would wait for ever, or an action is missing.
    """
    done = bytearray(numbers.size)
    steps = [[(device, a, *numbers.of(a)) for a in order] for device, order in enumerate(orders)]
    position = [0] * len(orders)
    found: list[tuple[int, Compute, int, int]] = []
    moved = True
    while moved:
        moved = False
        for device, program in enumerate(steps):
            start = place = position[device]
            while place < len(program):
                step = program[place]
                _, action, number, needed = step
                if joint.stages:
                    needed = numbers.awaited(action, joint)
                if needed != NOTHING and not done[needed]:
                    break
                done[number] = 1
                found.append(step)
                place += 1
            position[device] = place
            moved = moved or place > start
    if len(found) < sum(map(len, orders)):
        device = next(d for d, order in enumerate(orders) if position[d] < len(order))
        stuck = orders[device][position[device]]
        raise PlanError(f"device {device} would wait for ever before {stuck}")
    return tuple(found)
