"""When each action of a schedule would run, on an ideal machine: one order over all devices."""

from __future__ import annotations

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

    def needs(action: Compute) -> Iterable[Compute]:
        stage, m = action.stage, action.microbatch
        if action.phase is Phase.FORWARD:
            wanted = [Compute(s, Phase.FORWARD, m) for s in sorted(sources.get(stage, ()))]
        else:
            wanted = [Compute(s, Phase.BACKWARD, m) for s in sorted(users.get(stage, ()))]
            wanted.insert(0, Compute(stage, Phase.FORWARD, m))
        return [joint.awaited(stage, need) for need in wanted]

    return needs


def timeline(
    orders: Orders, needs: Needs, *, forward: float = 1.0, backward: float = 2.0
) -> tuple[Timed, ...]:
    """Every action at the earliest time its device and its needs allow, sorted by start.

    The result is a linear extension: each action stands after all it needs, and the actions of a
    device stand in their own order.

    Raises:
        DeadlockError: when the orders and the needs contradict each other.
    """
    ends: dict[Compute, float] = {}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    result: list[Timed] = []
    for _ in range(sum(map(len, orders))):
        ready = []
        for device, order in enumerate(orders):
            if position[device] == len(order):
                continue
            required = [ends.get(need) for need in needs(order[position[device]])]
            known = [end for end in required if end is not None]
            if len(known) == len(required):
                ready.append((max([free[device], *known]), device))
        if not ready:
            raise DeadlockError(_stuck(orders, position, needs, ends))
        start, device = min(ready)
        action = orders[device][position[device]]
        end = start + (forward if action.phase is Phase.FORWARD else backward)
        ends[action] = free[device] = end
        position[device] += 1
        result.append(Timed(action, device, start, end))
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
    """A drawing with one column per unit of time, forwards and backwards taking one each.

    Made for one stage per device: it shows phase and micro-batch.
    """
    rows: list[dict[int, str]] = [{} for _ in orders]
    for timed in timeline(orders, needs, forward=1, backward=1):
        action = timed.action
        rows[timed.device][int(timed.start)] = f"{action.phase.value}{action.microbatch}"
    width = max((len(cell) for row in rows for cell in row.values()), default=1) + 1
    lines = []
    for device, row in enumerate(rows):
        cells = [row.get(time, ".").ljust(width) for time in range(max(row, default=-1) + 1)]
        lines.append(f"device {device} | {''.join(cells)}".rstrip())
    return "\n".join(lines)
