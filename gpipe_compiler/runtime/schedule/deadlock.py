"""The proof that a schedule ends: it is executed abstractly, with sends that block.

What is proved holds for any transport: a device that waits at a send until the receiver arrives
is the worst a transport can do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ..errors import DeadlockError, ScheduleError
from ..spec import Crossing
from .actions import (
    Action,
    Compute,
    Programs,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
from .flow import Flow
from .together import Joint


def prove(
    programs: Programs,
    placement: Sequence[int] | None = None,
    crossings: Sequence[Crossing] = (),
    joint: Collection[int] = (),
) -> None:
    """Run the programs abstractly and make sure that every device reaches its end.

    Args:
        programs: each device's actions.
        placement: the device of each stage; when given, it is also checked that every stage runs
            on its device, for every micro-batch, with all its inputs and gradients present.
        crossings: what must be present.
        joint: the stages that take all micro-batches as one, with the last of their actions.

    Raises:
        DeadlockError: naming every device that waits for ever, and its action.
        ScheduleError: naming a send without its receive, or a value that is not there in time.
    """
    _check_pairs(programs)
    flow = None
    if placement is not None:
        orders = [[a for a in program if isinstance(a, Compute)] for program in programs]
        flow = Flow(placement, crossings, Joint.of(joint, orders))
    for device, action in _executed(programs):
        if flow is not None:
            flow.step(device, action)
    if flow is not None:
        flow.check_complete()


def _check_pairs(programs: Programs) -> None:
    """Every transfer has one send and one receive, on two devices; nothing is there twice."""
    ends: dict[Transfer, list[int | None]] = {}
    for device, program in enumerate(programs):
        seen: set[Action] = set()
        for action in program:
            if isinstance(action, Send | Receive):
                pair = ends.setdefault(action.transfer, [None, None])
                side = isinstance(action, Receive)
                other = pair[side]
                if other is not None and other != device:
                    raise ScheduleError(f"devices {other} and {device} both have {action}")
                if other is not None:
                    raise ScheduleError(f"device {device} has {action} twice")
                pair[side] = device
            elif action in seen:
                raise ScheduleError(f"device {device} has {action} twice")
            else:
                seen.add(action)
    for transfer, (sender, receiver) in ends.items():
        if receiver is None:
            raise ScheduleError(f"device {sender} has send {transfer}, and nobody receives it")
        if sender is None:
            raise ScheduleError(f"device {receiver} has receive {transfer}, and nobody sends it")
        if sender == receiver:
            raise ScheduleError(f"device {sender} has send {transfer} to itself")


def _executed(programs: Programs) -> Iterator[tuple[int, Action]]:
    """Every action with its device in an order of execution, a send just before its receive.

    Raises:
        DeadlockError: when no device can go on and some are not at their end.
    """
    position = [0] * len(programs)
    owners = Counter(
        action for program in programs for action in program if isinstance(action, SharedSum)
    )
    met: dict[SharedSum, list[int]] = {}
    waiting: dict[Transfer, tuple[int, Action]] = {}
    runnable = list(range(len(programs)))
    while runnable:
        device = runnable.pop()
        program = programs[device]
        while position[device] < len(program):
            action = program[position[device]]
            if isinstance(action, Compute):
                position[device] += 1
                yield device, action
                continue
            # Only those who wait there take part: one who is still to run would be run twice.
            if isinstance(action, SharedSum):
                together = met.setdefault(action, [])
                together.append(device)
                if len(together) < owners[action]:
                    break
                for other in met.pop(action):
                    position[other] += 1
                    if other != device:
                        runnable.append(other)
                    yield other, action
                continue
            there = waiting.pop(action.transfer, None)
            if there is None:
                waiting[action.transfer] = device, action
                break
            here = device, action
            position[device] += 1
            position[there[0]] += 1
            runnable.append(there[0])
            yield from (there, here) if isinstance(action, Receive) else (here, there)
    stuck = [
        (device, str(program[position[device]]))
        for device, program in enumerate(programs)
        if position[device] < len(program)
    ]
    if stuck:
        raise DeadlockError(stuck)
