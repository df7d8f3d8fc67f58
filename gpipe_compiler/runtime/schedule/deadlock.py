"""The proof that a schedule ends: it is executed abstractly, with sends that block.

What is proved holds for any transport: a device that waits at a send until the receiver arrives
is the worst a transport can do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ..errors import DeadlockError, ScheduleError
from .actions import (
    Action,
    Compute,
    Crossing,
    Phase,
    Programs,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
from .joint import Joint


def prove(
    programs: Programs,
    placement: Sequence[int] | None = None,
    crossings: Sequence[Crossing] = (),
    joint: Collection[int] = (),
) -> None:
    """Run the programs abstractly and make sure that every device reaches its end.

    Args:
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
    """Every action with its device in an order of execution, a send just before its receive."""
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


Numbers = set[int]
"""The micro-batches that something is done for."""

Kind = tuple[int, Phase]
"""Stage and phase."""

Way = tuple[str, int, int, bool]
"""What transfers of different micro-batches have in common: value, source, target, gradient."""

Check = tuple[tuple[Numbers, ...], str | Kind]
"""Before an action a micro-batch has to be in one of the sets; otherwise what is missing."""


class Flow:
    """Follows an execution, action by action."""

    def __init__(
        self, placement: Sequence[int], crossings: Sequence[Crossing], joint: Joint
    ) -> None:
        self._placement = placement
        self._joint = joint
        kinds = [(stage, phase) for stage in range(len(placement)) for phase in Phase]
        self._run: dict[Kind, Numbers] = {kind: set() for kind in kinds}
        self._made: dict[Kind, Numbers] = {kind: set() for kind in kinds}
        self._came: dict[Way, Numbers] = {}
        self._summed: dict[int, SharedSum] = {}
        self._before_send: dict[Way, list[Numbers]] = {}
        self._before: dict[Kind, list[Check]] = {kind: [] for kind in kinds}
        for stage in range(len(placement)):
            forward, backward = (stage, Phase.FORWARD), (stage, Phase.BACKWARD)
            self._before[backward].append(((self._made[forward],), "its forward"))
            self._before[stage, Phase.WEIGHT].append(((self._made[backward],), backward))
        for crossing in crossings:
            self._expect_values(crossing)
            if crossing.gradient:
                self._expect_gradients(crossing)

    def _elsewhere(self, crossing: Crossing) -> Iterator[tuple[int, list[int]]]:
        """The other devices that use a value, each with its users."""
        users: dict[int, list[int]] = {}
        for target in crossing.targets:
            users.setdefault(self._placement[target], []).append(target)
        users.pop(self._placement[crossing.source], None)
        yield from users.items()

    def _expect_values(self, crossing: Crossing) -> None:
        made = self._made[crossing.source, Phase.FORWARD]
        there: dict[int, tuple[Numbers, ...]] = {self._placement[crossing.source]: (made,)}
        for device, users in self._elsewhere(crossing):
            ways = [(crossing.value, crossing.source, user, False) for user in users]
            there[device] = self._expect(ways, [made])
        for target in crossing.targets:
            check = there[self._placement[target]], f"{crossing.value} is there"
            self._before[target, Phase.FORWARD].append(check)

    def _expect_gradients(self, crossing: Crossing) -> None:
        checks = self._before[crossing.source, Phase.BACKWARD]
        for target in crossing.targets:
            kind = target, Phase.BACKWARD
            checks.append(((self._made[kind],), kind))
        for device, users in self._elsewhere(crossing):
            made = [self._made[user, Phase.BACKWARD] for user in users]
            ways = [(crossing.value, user, crossing.source, True) for user in users]
            missing = f"the gradient of {crossing.value} from device {device}"
            checks.append((self._expect(ways, made), missing))

    def _expect(self, ways: Sequence[Way], made: list[Numbers]) -> tuple[Numbers, ...]:
        """What comes by one of the ways, when all of `made` has been."""
        for way in ways:
            self._came[way] = set()
            self._before_send[way] = made
        return tuple(self._came[way] for way in ways)

    def step(self, device: int, action: Action) -> None:
        """Check one action, and note what it makes.

        Raises:
            ScheduleError: when it is on the wrong device, or something it needs is not there.
        """
        if isinstance(action, Compute):
            self._compute(device, action)
        elif isinstance(action, Send):
            self._send(device, action)
        elif isinstance(action, Receive):
            transfer = action.transfer
            self._on(device, transfer.target, action)
            self._came[_way(transfer)].add(transfer.microbatch)
        else:
            owners = (stage for stage in action.stages if self._placement[stage] == device)
            self._summed.update(dict.fromkeys(owners, action))

    def _on(self, device: int, stage: int, action: Action) -> None:
        if self._placement[stage] != device:
            raise ScheduleError(
                f"device {device} has {action}, but stage {stage} is on {self._placement[stage]}"
            )

    def _compute(self, device: int, action: Compute) -> None:
        self._on(device, action.stage, action)
        kind = action.stage, action.phase
        run = self._run[kind]
        if action.microbatch in run:
            raise ScheduleError(f"{action} runs twice")
        if action.stage in self._summed and action.phase is not Phase.FORWARD:
            raise ScheduleError(f"{action} runs after {self._summed[action.stage]}")
        run.add(action.microbatch)
        made = self._made[kind]
        for m in self._joint.completed(action):
            for sets, missing in self._before[kind]:
                for numbers in sets:
                    if m in numbers:
                        break
                else:
                    what = missing if isinstance(missing, str) else Compute(*missing, m)
                    raise ScheduleError(f"{action} runs before {what}")
            made.add(m)

    def _send(self, device: int, action: Send) -> None:
        transfer = action.transfer
        self._on(device, transfer.source, action)
        needed = self._before_send.get(_way(transfer))
        if needed is None:
            raise ScheduleError(f"device {device} has send {transfer}, which is no boundary value")
        for numbers in needed:
            if transfer.microbatch not in numbers:
                raise ScheduleError(f"device {device} has send {transfer} before the value is made")

    def check_complete(self) -> None:
        """Raise unless every stage ran the same micro-batches.

        Backward everywhere or nowhere, and in one part everywhere or in two.

        Raises:
            ScheduleError: naming an action that is missing.
        """
        microbatches = set().union(*self._run.values())
        phases = {phase for (_, phase), run in self._run.items() if run}
        for kind, run in self._run.items():
            _, phase = kind
            if phase in phases and run != microbatches:
                raise ScheduleError(f"{Compute(*kind, min(microbatches - run))} is missing")


def _way(transfer: Transfer) -> Way:
    return transfer.value, transfer.source, transfer.target, transfer.gradient
