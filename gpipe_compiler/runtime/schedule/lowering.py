"""From the order of computation to full programs, with every transfer in its place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ..spec import Crossing
from .actions import (
    Action,
    Compute,
    Orders,
    Phase,
    Programs,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
from .clock import needs_of, timeline
from .together import Joint


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
        placement: the device of each stage.
        shared: parameters owned by several stages, by name; their gradients are summed over the
            devices of the owners after the last backward of all owners, both parts of it.
        joint: the stages that take all micro-batches as one (`together.Joint`).

    Raises:
        DeadlockError: when the orders contradict the crossings.
    """
    programs: list[list[Action]] = [[] for _ in orders]
    together = Joint.of(joint, orders)
    order = [timed.action for timed in timeline(orders, needs_of(crossings, together))]
    training = any(action.phase is Phase.BACKWARD for action in order)
    sums = _sums(order, placement, shared or {}) if training else {}
    pending = _gradient_counts(placement, crossings)
    done: dict[tuple[str, int, int], int] = {}
    for position, action in enumerate(order):
        programs[placement[action.stage]].append(action)
        for m in together.completed(action):
            made = Compute(action.stage, action.phase, m)
            for transfer in _transfers(made, placement, crossings, pending, done):
                programs[placement[transfer.source]].append(Send(transfer))
                programs[placement[transfer.target]].append(Receive(transfer))
        for total in sums.get(position, ()):
            for device in sorted({placement[stage] for stage in total.stages}):
                programs[device].append(total)
    return tuple(map(tuple, programs))


def _gradient_counts(
    placement: Sequence[int], crossings: Sequence[Crossing]
) -> dict[tuple[str, int], int]:
    """How many stages of each device add to the gradient of each value."""
    counts: dict[tuple[str, int], int] = {}
    for crossing in crossings:
        for target in crossing.targets:
            key = crossing.value, placement[target]
            counts[key] = counts.get(key, 0) + 1
    return counts


def _transfers(
    action: Compute,
    placement: Sequence[int],
    crossings: Sequence[Crossing],
    pending: Mapping[tuple[str, int], int],
    done: dict[tuple[str, int, int], int],
) -> Iterator[Transfer]:
    device = placement[action.stage]
    m = action.microbatch
    for crossing in crossings:
        if action.phase is Phase.FORWARD and crossing.source == action.stage:
            for first in first_targets(crossing, placement):
                yield Transfer(crossing.value, m, crossing.source, first)
        elif (
            action.phase is Phase.BACKWARD
            and crossing.gradient
            and action.stage in crossing.targets
            and placement[crossing.source] != device
        ):
            key = crossing.value, device, m
            done[key] = done.get(key, 0) + 1
            if done[key] == pending[crossing.value, device]:
                first = min(t for t in crossing.targets if placement[t] == device)
                yield Transfer(crossing.value, m, first, crossing.source, gradient=True)


def first_targets(crossing: Crossing, placement: Sequence[int]) -> tuple[int, ...]:
    """The first stage that uses the value on each device other than the maker's."""
    firsts: dict[int, int] = {}
    for target in sorted(crossing.targets):
        firsts.setdefault(placement[target], target)
    firsts.pop(placement[crossing.source], None)
    return tuple(firsts.values())


def _sums(
    order: Sequence[Compute], placement: Sequence[int], shared: Mapping[str, Sequence[int]]
) -> dict[int, list[SharedSum]]:
    """Sums of shared gradients by the position in the global order that they follow."""
    last: dict[int, int] = {}
    for position, action in enumerate(order):
        if action.phase is not Phase.FORWARD:
            last[action.stage] = position
    sums: dict[int, list[SharedSum]] = {}
    for name, owners in shared.items():
        if len({placement[stage] for stage in owners}) > 1:
            position = max(last[stage] for stage in owners)
            sums.setdefault(position, []).append(SharedSum(name, tuple(sorted(owners))))
    return sums
