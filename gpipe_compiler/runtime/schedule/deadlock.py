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
        flow = _Flow(placement, crossings, Joint.of(joint, orders))
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


class _Flow:
    """Follows an execution, action by action: what is made, and where it has come."""

    def __init__(
        self, placement: Sequence[int], crossings: Sequence[Crossing], joint: Joint
    ) -> None:
        self._placement = placement
        self._joint = joint
        self._crossings = {crossing.value: crossing for crossing in crossings}
        self._read: dict[int, list[Crossing]] = {}
        self._given_back: dict[int, list[Crossing]] = {}
        for crossing in crossings:
            for target in crossing.targets:
                self._read.setdefault(target, []).append(crossing)
            if crossing.gradient:
                self._given_back.setdefault(crossing.source, []).append(crossing)
        self._run: dict[tuple[int, Phase], set[int]] = {}
        self._made: set[Compute] = set()
        self._came: set[tuple[str, int, int, int]] = set()  # value, micro-batch, from, to device
        self._summed: dict[int, SharedSum] = {}

    def step(self, device: int, action: Action) -> None:
        """Check one action, and note what it makes.

        Raises:
            ScheduleError: when it is on the wrong device, or something it needs is not there.
        """
        if isinstance(action, Compute):
            self._compute(device, action)
        elif isinstance(action, Send):
            self._send(device, action.transfer)
        elif isinstance(action, Receive):
            transfer = action.transfer
            self._on(device, transfer.target, action)
            source = self._placement[transfer.source]
            self._came.add((transfer.value, transfer.microbatch, source, device))
        else:
            owners = (stage for stage in action.stages if self._placement[stage] == device)
            self._summed.update(dict.fromkeys(owners, action))

    def _on(self, device: int, stage: int, action: Action) -> None:
        if self._placement[stage] != device:
            raise ScheduleError(
                f"device {device} has {action}, but stage {stage} is on {self._placement[stage]}"
            )

    def _compute(self, device: int, action: Compute) -> None:
        stage, phase, own = action
        self._on(device, stage, action)
        if stage in self._summed and phase is not Phase.FORWARD:
            raise ScheduleError(f"{action} runs after {self._summed[stage]}")
        self._run.setdefault((stage, phase), set()).add(own)
        numbers = self._joint.completed(action)
        for m in numbers:
            for missing in self._missing(device, Compute(stage, phase, m)):
                raise ScheduleError(f"{action} runs before {missing}")
        self._made.update(Compute(stage, phase, m) for m in numbers)

    def _missing(self, device: int, action: Compute) -> Iterator[object]:
        """What an action needs and is not there."""
        stage, phase, m = action
        needed: list[Compute] = []
        if phase is Phase.FORWARD:
            for crossing in self._read.get(stage, ()):
                home = self._placement[crossing.source]
                made = Compute(crossing.source, phase, m) in self._made
                if not (
                    made if home == device else (crossing.value, m, home, device) in self._came
                ):
                    yield f"{crossing.value} is there"
        elif phase is Phase.BACKWARD:
            needed.append(Compute(stage, Phase.FORWARD, m))
            for crossing in self._given_back.get(stage, ()):
                needed.extend(Compute(target, phase, m) for target in crossing.targets)
                for other in {self._placement[target] for target in crossing.targets} - {device}:
                    if (crossing.value, m, other, device) not in self._came:
                        yield f"the gradient of {crossing.value} from device {other}"
        else:
            needed.append(Compute(stage, Phase.BACKWARD, m))
        yield from (need for need in needed if need not in self._made)

    def _send(self, device: int, transfer: Transfer) -> None:
        self._on(device, transfer.source, Send(transfer))
        crossing = self._crossings.get(transfer.value)
        source, target = transfer.source, transfer.target
        user, maker = (source, target) if transfer.gradient else (target, source)
        if crossing is None or crossing.source != maker or user not in crossing.targets:
            raise ScheduleError(f"device {device} has send {transfer}, which is no boundary value")
        phase = Phase.BACKWARD if transfer.gradient else Phase.FORWARD
        makers = crossing.targets if transfer.gradient else (maker,)
        for stage in makers:
            made = Compute(stage, phase, transfer.microbatch) in self._made
            if self._placement[stage] == device and not made:
                raise ScheduleError(f"device {device} has send {transfer} before the value is made")

    def check_complete(self) -> None:
        """Raise unless every stage ran the same micro-batches.

        Backward everywhere or nowhere, and in one part everywhere or in two.

        Raises:
            ScheduleError: naming an action that is missing.
        """
        microbatches = set[int]().union(*self._run.values())
        for phase in {phase for _, phase in self._run}:
            for stage in range(len(self._placement)):
                left = microbatches - self._run.get((stage, phase), set())
                if left:
                    raise ScheduleError(f"{Compute(stage, phase, min(left))} is missing")
