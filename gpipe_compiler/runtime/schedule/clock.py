"""When each action of a schedule would run, on an ideal machine: one order over all devices."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DeadlockError
from .actions import Compute, Crossing, Orders, Phase
from .joint import Joint

NOTHING_JOINT = Joint()

Kind = tuple[int, Phase]
"""Stage and phase: what actions on different micro-batches have in common."""


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

    def kinds(self, stage: int, phase: Phase) -> tuple[Kind, ...]:
        """The actions that one of this kind needs, on its micro-batch."""
        if phase is Phase.FORWARD:
            return tuple((other, phase) for other in self.forwards.get(stage, ()))
        if phase is Phase.WEIGHT:
            return ((stage, Phase.BACKWARD),)
        later = tuple((other, phase) for other in self.backwards.get(stage, ()))
        return ((stage, Phase.FORWARD), *later)

    def of(self, action: Compute) -> tuple[Compute, ...]:
        """The actions that this one needs."""
        wanted = (
            Compute(*kind, action.microbatch) for kind in self.kinds(action.stage, action.phase)
        )
        return tuple(self.joint.awaited(action.stage, need) for need in wanted)


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
    work = _works(
        orders, needs, {Phase.FORWARD: forward, Phase.BACKWARD: backward, Phase.WEIGHT: weight}
    )
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    ready: list[tuple[float, int]] = []

    def advance(device: int) -> None:
        """Let the device's next action stand ready, or wait for the first thing it misses."""
        if position[device] == len(orders[device]):
            return
        action = orders[device][position[device]]
        start, m = free[device], action.microbatch
        for needed, last in work[action.stage, action.phase].needs:
            number = m if last is None else last
            end = needed.ends.get(number)
            if end is None:
                needed.blocked.setdefault(number, []).append(device)
                return
            start = max(start, end)
        heapq.heappush(ready, (start, device))

    for device in range(len(orders)):
        advance(device)
    while ready:
        start, device = heapq.heappop(ready)
        action = orders[device][position[device]]
        kind = work[action.stage, action.phase]
        end = kind.ends[action.microbatch] = free[device] = start + kind.seconds
        position[device] += 1
        yield Timed(action, device, start, end)
        advance(device)
        for other in kind.blocked.pop(action.microbatch, ()):
            advance(other)
    stuck = [
        (device, f"{order[place]}, which needs {_missing(order[place], needs, work)}")
        for device, (order, place) in enumerate(zip(orders, position, strict=True))
        if place < len(order)
    ]
    if stuck:
        raise DeadlockError(stuck)


class _Work:
    """All actions of one kind, while time goes on.

    Attributes:
        needs: other kinds, of which the action on the same micro-batch is needed, or that on a
            micro-batch of its own (the last one, where a stage is joint).
        ends: by micro-batch, of the actions that have run.
        blocked: by micro-batch, the devices that wait for the action.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.needs: list[tuple[_Work, int | None]] = []
        self.ends: dict[int, float] = {}
        self.blocked: dict[int, list[int]] = {}


def _works(orders: Orders, needs: Needs, seconds: Mapping[Phase, float]) -> dict[Kind, _Work]:
    """The work of every kind that there is, or that is needed."""
    there = {(action.stage, action.phase) for order in orders for action in order}
    work: dict[Kind, _Work] = {}

    def of(kind: Kind) -> _Work:
        if kind not in work:
            stage, phase = kind
            second = seconds[Phase.WEIGHT] if (stage, Phase.WEIGHT) in there else 0.0
            work[kind] = _Work(seconds[phase] - (second if phase is Phase.BACKWARD else 0.0))
        return work[kind]

    for stage, phase in there:
        for kind in needs.kinds(stage, phase):
            last = needs.joint.awaited_of(stage, *kind)
            of((stage, phase)).needs.append((of(kind), last))
        of((stage, phase))
    return work


def _missing(action: Compute, needs: Needs, work: Mapping[Kind, _Work]) -> str:
    missing = [
        str(need)
        for need in needs.of(action)
        if need.microbatch not in work[need.stage, need.phase].ends
    ]
    return " ".join(missing) or "nothing more"
