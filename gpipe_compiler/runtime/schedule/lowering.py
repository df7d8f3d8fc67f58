"""From the order of computation to full programs, with every transfer in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..errors import ScheduleError
from .actions import (
    Action,
    Compute,
    Crossing,
    Orders,
    Phase,
    Programs,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
from .clock import needs_of, timeline
from .joint import Joint


def lower(
    orders: Orders,
    placement: Sequence[int],
    crossings: Sequence[Crossing],
    shared: Mapping[str, Sequence[int]] | None = None,
    joint: Collection[int] = (),
) -> Programs:
    """Each device's actions with the sends and receives of every boundary value.

    All actions are put into one global order by a simulated clock. A transfer stands right after
    the action that makes its value, in the programs of both devices, so each program is a
    projection of one global order: nobody waits for ever, even where a send blocks until the
    receiver arrives, and any two devices agree on the order of what passes between them.

    A value goes once to each device that uses it; its gradient comes back once from each, after
    the last backward there that adds to it. Between stages of one device nothing is sent. What a
    joint stage makes follows, for all micro-batches, the last of its actions.

    Args:
        orders: each device's compute actions; transfers of gradients follow where it has backwards.
        shared: parameters owned by several stages, by name; their gradients are summed over the
            devices of the owners after the last backward of all owners, both parts of it.
        joint: the stages that take all micro-batches as one (`schedule.joint`).

    Raises:
        DeadlockError: when the orders contradict the crossings.
        ScheduleError: when an action is missing, is there twice, or is on another device.
    """
    _check(orders, placement)
    programs: list[list[Action]] = [[] for _ in orders]
    together = Joint.of(joint, orders)
    sums = _Sums(orders, placement, shared or {})
    sent = _Sent(placement, crossings)
    for timed in timeline(orders, needs_of(crossings, together)):
        action = timed.action
        programs[timed.device].append(action)
        for m in together.completed(action):
            for transfer in sent.after(action.stage, action.phase, m):
                programs[placement[transfer.source]].append(Send(transfer))
                programs[placement[transfer.target]].append(Receive(transfer))
        for total in sums.after(action):
            for device in sorted({placement[stage] for stage in total.stages}):
                programs[device].append(total)
    return tuple(map(tuple, programs))


def _check(orders: Orders, placement: Sequence[int]) -> None:
    """Whether each stage takes the same micro-batches once, on its device, and all of them the
    same phases."""
    taken: dict[tuple[int, Phase], set[int]] = {}
    for device, order in enumerate(orders):
        for action in order:
            stage, phase, m = action
            if placement[stage] != device:
                raise ScheduleError(
                    f"device {device} has {action}, but stage {stage} is on {placement[stage]}"
                )
            numbers = taken.setdefault((stage, phase), set())
            if m in numbers:
                raise ScheduleError(f"device {device} has {action} twice")
            numbers.add(m)
    microbatches = set[int]().union(*taken.values())
    for phase in {phase for _, phase in taken}:
        for stage in range(len(placement)):
            left = microbatches - taken.get((stage, phase), set())
            if left:
                raise ScheduleError(f"{Compute(stage, phase, min(left))} is missing")


class _Sent:
    """What is sent once a stage has made it: values on forwards, gradients on backwards.

    A gradient goes back from a device when all stages there that use the value have added to it.
    """

    def __init__(self, placement: Sequence[int], crossings: Sequence[Crossing]) -> None:
        self._values: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self._gradients: dict[int, list[tuple[str, int, int, int]]] = {}
        self._added: dict[Transfer, int] = {}
        for crossing in crossings:
            firsts = first_targets(crossing, placement)
            if firsts:
                self._values.setdefault(crossing.source, []).append((crossing.value, firsts))
            if crossing.gradient:
                for first in firsts:
                    users = [t for t in crossing.targets if placement[t] == placement[first]]
                    gradient = crossing.value, first, crossing.source, len(users)
                    for user in users:
                        self._gradients.setdefault(user, []).append(gradient)

    def after(self, stage: int, phase: Phase, microbatch: int) -> Iterator[Transfer]:
        if phase is Phase.FORWARD:
            for value, firsts in self._values.get(stage, ()):
                for first in firsts:
                    yield Transfer(value, microbatch, stage, first)
        elif phase is Phase.BACKWARD:
            for value, source, target, summands in self._gradients.get(stage, ()):
                transfer = Transfer(value, microbatch, source, target, gradient=True)
                self._added[transfer] = self._added.get(transfer, 0) + 1
                if self._added[transfer] == summands:
                    yield transfer


class _Sums:
    """The sums of shared gradients, each after the last backward of all its owners."""

    def __init__(
        self, orders: Orders, placement: Sequence[int], shared: Mapping[str, Sequence[int]]
    ) -> None:
        self._of: dict[int, list[SharedSum]] = {}
        for name, owners in shared.items():
            if len({placement[stage] for stage in owners}) > 1:
                for stage in sorted(owners):
                    self._of.setdefault(stage, []).append(SharedSum(name, tuple(sorted(owners))))
        self._left = Counter(
            action.stage
            for order in orders
            for action in order
            if action.stage in self._of and action.phase is not Phase.FORWARD
        )

    def after(self, action: Compute) -> Iterator[SharedSum]:
        if action.stage in self._of and action.phase is not Phase.FORWARD:
            self._left[action.stage] -= 1
            for total in self._of[action.stage]:
                if not any(self._left[owner] for owner in total.stages):
                    yield total


def first_targets(crossing: Crossing, placement: Sequence[int]) -> tuple[int, ...]:
    """The first stage that uses the value on each device other than the maker's."""
    firsts: dict[int, int] = {}
    for target in sorted(crossing.targets):
        firsts.setdefault(placement[target], target)
    firsts.pop(placement[crossing.source], None)
    return tuple(firsts.values())
