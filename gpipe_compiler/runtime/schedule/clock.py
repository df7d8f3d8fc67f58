"""When each action of a schedule would run, on an ideal machine: one order over all devices."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DeadlockError
from .actions import Compute, Crossing, Orders, Phase, split_stages
from .joint import Joint

NOTHING_JOINT = Joint()


class Timed(NamedTuple):
    """An action with the time at which it starts and ends."""

    action: Compute
    device: int
    start: float
    end: float


@dataclass(frozen=True)
class Needs:
    """What must have ended before an action can start, beside its device being free.

    Attributes:
        forwards: for a stage, those whose forward comes before its own.
        backwards: for a stage, those whose backward comes before its own.
        joint: the stages where that holds for all micro-batches together, not one by one.
    """

    forwards: Mapping[int, tuple[int, ...]]
    backwards: Mapping[int, tuple[int, ...]]
    joint: Joint = NOTHING_JOINT

    def of(self, action: Compute) -> list[Compute]:
        stage, phase, m = action.stage, action.phase, action.microbatch
        if phase is Phase.FORWARD:
            found = [Compute(other, phase, m) for other in self.forwards.get(stage, ())]
        elif phase is Phase.BACKWARD:
            later = self.backwards.get(stage, ())
            found = [Compute(stage, Phase.FORWARD, m), *(Compute(s, phase, m) for s in later)]
        else:
            found = [Compute(stage, Phase.BACKWARD, m)]
        return [self.joint.awaited(stage, need) for need in found] if self.joint.stages else found


def needs_of(crossings: Sequence[Crossing], joint: Joint = NOTHING_JOINT) -> Needs:
    """The dependencies that boundary values make between actions.

    They are those between the actions of a micro-batch, except where a stage is joint.
    """
    sources: dict[int, set[int]] = {}
    users: dict[int, set[int]] = {}
    for crossing in crossings:
        for target in crossing.targets:
            sources.setdefault(target, set()).add(crossing.source)
            if crossing.gradient:
                users.setdefault(crossing.source, set()).add(target)
    return Needs(
        {stage: tuple(sorted(found)) for stage, found in sources.items()},
        {stage: tuple(sorted(found)) for stage, found in users.items()},
        joint,
    )


def timeline(
    orders: Orders,
    needs: Needs,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
) -> Iterator[Timed]:
    """Every action at the earliest time its device and its needs allow, sorted by start.

    That is a linear extension: each action stands after all it needs, and the actions of a device
    stand in their own order.

    Args:
        backward: both parts of it; the first part alone takes that less `weight`.

    Raises:
        DeadlockError: when the orders and the needs contradict each other.
    """
    split = split_stages(orders)
    ends: dict[Compute, float] = {}
    blocked: dict[Compute, list[int]] = {}
    left = [iter(order) for order in orders]
    current = [next(order, None) for order in left]
    free = [0.0] * len(orders)
    ready: list[tuple[float, int]] = []

    def advance(device: int) -> None:
        """Let the device's next action stand ready, or wait for the first thing it misses."""
        action, start = current[device], free[device]
        if action is None:
            return
        for need in needs.of(action):
            end = ends.get(need)
            if end is None:
                blocked.setdefault(need, []).append(device)
                return
            start = max(start, end)
        heapq.heappush(ready, (start, device))

    for device in range(len(orders)):
        advance(device)
    while ready:
        start, device = heapq.heappop(ready)
        action = current[device]
        assert action is not None  # it stands ready
        seconds = forward if action.phase is Phase.FORWARD else weight
        if action.phase is Phase.BACKWARD:
            seconds = backward - weight if action.stage in split else backward
        end = ends[action] = free[device] = start + seconds
        current[device] = next(left[device], None)
        yield Timed(action, device, start, end)
        advance(device)
        for other in blocked.pop(action, ()):
            advance(other)
    stuck = []
    for device, action in enumerate(current):
        if action is not None:
            missing = " ".join(str(need) for need in needs.of(action) if need not in ends)
            stuck.append((device, f"{action}, which needs {missing or 'nothing more'}"))
    if stuck:
        raise DeadlockError(stuck)
