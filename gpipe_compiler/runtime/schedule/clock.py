"""When each action of a schedule would run, on an ideal machine: one order over all devices."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import DeadlockError
from ..spec import Crossing
from .actions import Compute, Orders, Phase
from .together import Joint

NOTHING_JOINT = Joint()

Needs = Callable[[Compute], Iterable[Compute]]
"""What must have ended before an action can start, beside its device being free."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with the time at which it starts and ends."""

    action: Compute
    device: int
    start: float
    end: float


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
    before = {stage: sorted(found) for stage, found in sources.items()}
    behind = {stage: sorted(found) for stage, found in users.items()}

    def needs(action: Compute) -> Iterable[Compute]:
        stage, m = action.stage, action.microbatch
        if action.phase is Phase.FORWARD:
            wanted = [Compute(s, Phase.FORWARD, m) for s in before.get(stage, ())]
        elif action.phase is Phase.BACKWARD:
            wanted = [Compute(stage, Phase.FORWARD, m)]
            wanted += [Compute(s, Phase.BACKWARD, m) for s in behind.get(stage, ())]
        else:
            wanted = [Compute(stage, Phase.BACKWARD, m)]
        if not joint.stages:
            return wanted
        return [joint.awaited(stage, need) for need in wanted]

    return needs


def timeline(
    orders: Orders,
    needs: Needs,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
) -> tuple[Timed, ...]:
    """Every action at the earliest time its device and its needs allow, sorted by start.

    The result is a linear extension: each action stands after all it needs, and the actions of a
    device stand in their own order.

    Args:
        backward: both parts of it; the first part alone takes that less `weight`.

    Raises:
        DeadlockError: when the orders and the needs contradict each other.
    """
    split = {a.stage for order in orders for a in order if a.phase is Phase.WEIGHT}
    ends: dict[Compute, float] = {}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    ready: list[tuple[float, int]] = []
    blocked: dict[Compute, list[int]] = {}
    result: list[Timed] = []

    def advance(device: int) -> None:
        """Let the device's next action stand ready, or wait for the first thing it misses."""
        if position[device] == len(orders[device]):
            return
        start = free[device]
        for need in needs(orders[device][position[device]]):
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
        action = orders[device][position[device]]
        if action.phase is Phase.FORWARD:
            seconds = forward
        elif action.phase is Phase.WEIGHT:
            seconds = weight
        else:
            seconds = backward - weight if action.stage in split else backward
        ends[action] = free[device] = start + seconds
        position[device] += 1
        result.append(Timed(action, device, start, start + seconds))
        advance(device)
        for other in blocked.pop(action, ()):
            advance(other)
    if len(result) < sum(map(len, orders)):
        raise DeadlockError(_stuck(orders, position, needs, ends))
    return tuple(result)


def _stuck(
    orders: Orders, position: Sequence[int], needs: Needs, ends: dict[Compute, float]
) -> list[tuple[int, str]]:
    stuck = []
    for device, order in enumerate(orders):
        if position[device] < len(order):
            action = order[position[device]]
            missing = " ".join(str(need) for need in needs(action) if need not in ends)
            stuck.append((device, f"{action}, which needs {missing or 'nothing more'}"))
    return stuck


def diagram(orders: Orders, needs: Needs) -> str:
    """A drawing with one column per unit of time.

    Forwards and backwards take one each, and so do both parts of a backward in two parts. A cell
    shows phase and micro-batch, after the stage where devices hold several.
    """
    split = any(action.phase is Phase.WEIGHT for order in orders for action in order)
    several = any(len({action.stage for action in order}) > 1 for order in orders)
    rows: list[dict[int, str]] = [{} for _ in orders]
    for timed in timeline(orders, needs, forward=1, backward=2 if split else 1, weight=1):
        action = timed.action
        text = str(action) if several else f"{action.phase.value}{action.microbatch}"
        rows[timed.device][int(timed.start)] = text
    width = max((len(cell) for row in rows for cell in row.values()), default=1) + 1
    lines = []
    for device, row in enumerate(rows):
        cells = [row.get(time, ".").ljust(width) for time in range(max(row, default=-1) + 1)]
        lines.append(f"device {device} | {''.join(cells)}".rstrip())
    return "\n".join(lines)
