"""The proof that a schedule ends: it is executed abstractly, with sends that block.

What is proved holds for any transport: a device that waits at a send until the receiver arrives
is the worst a transport can do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ..errors import DeadlockError, ScheduleError
from ..spec import Crossing
from .actions import (
    Action,
    Compute,
    Phase,
    Programs,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
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
        flow = _Flow(placement, crossings, Joint.of(joint, orders))
    for device, action in _executed(programs):
        if flow is not None:
            flow.step(device, action)
    if flow is not None:
        flow.check_complete()


def _check_pairs(programs: Programs) -> None:
    """Every transfer has one send and one receive, on two devices; sums have all their owners."""
    sends: dict[Transfer, int] = {}
    receives: dict[Transfer, int] = {}
    for device, program in enumerate(programs):
        seen: set[Action] = set()
        for action in program:
            if action in seen:
                raise ScheduleError(f"device {device} has {action} twice")
            seen.add(action)
            if isinstance(action, Send | Receive):
                table = sends if isinstance(action, Send) else receives
                if action.transfer in table:
                    raise ScheduleError(
                        f"devices {table[action.transfer]} and {device} both have {action}"
                    )
                table[action.transfer] = device
    for transfer, device in sends.items():
        if transfer not in receives:
            raise ScheduleError(f"device {device} has send {transfer}, and nobody receives it")
        if receives[transfer] == device:
            raise ScheduleError(f"device {device} has send {transfer} to itself")
    for transfer, device in receives.items():
        if transfer not in sends:
            raise ScheduleError(f"device {device} has receive {transfer}, and nobody sends it")


def _executed(programs: Programs) -> Iterator[tuple[int, Action]]:
    """Every action with its device in an order of execution, a send just before its receive.

    Raises:
        DeadlockError: when no device can go on and some are not at their end.
    """
    position = [0] * len(programs)
    owners: dict[SharedSum, list[int]] = {}
    for device, program in enumerate(programs):
        for action in program:
            if isinstance(action, SharedSum):
                owners.setdefault(action, []).append(device)
    waiting: dict[Action, int] = {}
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
            together = _meeting(device, action, position, programs, owners, waiting)
            if together is None:
                break
            for other, its_action in together:
                position[other] += 1
                if other != device:
                    runnable.append(other)
                yield other, its_action
    stuck = [
        (device, str(program[position[device]]))
        for device, program in enumerate(programs)
        if position[device] < len(program)
    ]
    if stuck:
        raise DeadlockError(stuck)


def _meeting(
    device: int,
    action: Send | Receive | SharedSum,
    position: Sequence[int],
    programs: Programs,
    owners: dict[SharedSum, list[int]],
    waiting: dict[Action, int],
) -> list[tuple[int, Action]] | None:
    """Those that take part in the action with `device`, when all have arrived, sender first."""
    if isinstance(action, SharedSum):
        devices = owners[action]
        arrived = all(
            position[other] < len(programs[other]) and programs[other][position[other]] == action
            for other in devices
        )
        return [(other, action) for other in devices] if arrived else None
    half = Receive(action.transfer) if isinstance(action, Send) else Send(action.transfer)
    other = waiting.pop(half, None)
    if other is None:
        waiting[action] = device
        return None
    pair: list[tuple[int, Action]] = [(device, action), (other, half)]
    return pair if isinstance(action, Send) else pair[::-1]


class _Flow:
    """What each device holds while the programs run: data must be there before it is used."""

    def __init__(
        self, placement: Sequence[int], crossings: Sequence[Crossing], joint: Joint
    ) -> None:
        self.placement = placement
        self.crossings = {crossing.value: crossing for crossing in crossings}
        self.joint = joint
        self.run: set[Compute] = set()
        self.made: set[Compute] = set()
        self.received: set[Transfer] = set()

    def step(self, device: int, action: Action) -> None:
        """Check one action, and note what it makes."""
        match action:
            case Compute():
                self._compute(device, action)
            case Send(transfer=transfer):
                self._send(device, transfer)
            case Receive(transfer=transfer):
                self.received.add(transfer)
                self._on(device, transfer.target, f"receive {transfer}")
            case SharedSum():
                pass

    def _on(self, device: int, stage: int, what: str) -> None:
        if self.placement[stage] != device:
            raise ScheduleError(
                f"device {device} has {what}, but stage {stage} is on {self.placement[stage]}"
            )

    def _compute(self, device: int, action: Compute) -> None:
        self._on(device, action.stage, str(action))
        if action in self.run:
            raise ScheduleError(f"{action} runs twice")
        self.run.add(action)
        completed = self.joint.completed(action)
        for m in completed:
            self._check(device, action, m)
        self.made.update(Compute(action.stage, action.phase, m) for m in completed)

    def _check(self, device: int, action: Compute, m: int) -> None:
        """What `action` needs of micro-batch `m`."""
        if (
            action.phase is Phase.BACKWARD
            and Compute(action.stage, Phase.FORWARD, m) not in self.made
        ):
            raise ScheduleError(f"{action} runs before its forward")
        if (
            action.phase is Phase.WEIGHT
            and Compute(action.stage, Phase.BACKWARD, m) not in self.made
        ):
            raise ScheduleError(f"{action} runs before {action.stage}B{m}")
        for crossing in self.crossings.values():
            if action.phase is Phase.FORWARD and action.stage in crossing.targets:
                if not self._has(device, crossing, m):
                    raise ScheduleError(f"{action} runs before {crossing.value} is there")
            elif (
                action.phase is Phase.BACKWARD
                and crossing.gradient
                and crossing.source == action.stage
            ):
                self._gradients(device, crossing, action, m)

    def _has(self, device: int, crossing: Crossing, m: int) -> bool:
        """Whether a boundary value is on a device: made there, or received by a stage there."""
        if self.placement[crossing.source] == device:
            return Compute(crossing.source, Phase.FORWARD, m) in self.made
        return any(
            Transfer(crossing.value, m, crossing.source, target) in self.received
            for target in crossing.targets
            if self.placement[target] == device
        )

    def _gradients(self, device: int, crossing: Crossing, action: Compute, m: int) -> None:
        for target in crossing.targets:
            if Compute(target, Phase.BACKWARD, m) not in self.made:
                raise ScheduleError(f"{action} runs before {target}B{m}")
        for other in {self.placement[target] for target in crossing.targets} - {device}:
            arrived = any(
                Transfer(crossing.value, m, target, crossing.source, gradient=True) in self.received
                for target in crossing.targets
                if self.placement[target] == other
            )
            if not arrived:
                raise ScheduleError(
                    f"{action} runs before the gradient of {crossing.value} from device {other}"
                )

    def _send(self, device: int, transfer: Transfer) -> None:
        self._on(device, transfer.source, f"send {transfer}")
        crossing = self.crossings.get(transfer.value)
        m = transfer.microbatch
        if crossing is None:
            raise ScheduleError(f"device {device} has send {transfer}, which is no boundary value")
        if transfer.gradient:
            made = all(
                Compute(target, Phase.BACKWARD, m) in self.made
                for target in crossing.targets
                if self.placement[target] == device
            )
        else:
            made = Compute(transfer.source, Phase.FORWARD, m) in self.made
        if not made:
            raise ScheduleError(f"device {device} has send {transfer} before the value is made")

    def check_complete(self) -> None:
        """Raise unless every stage ran the same micro-batches, backward everywhere or nowhere.

        A stage may have its backward in one part or in two, but the same for all micro-batches.
        """
        microbatches = {action.microbatch for action in self.run}
        phases = {action.phase for action in self.run}
        split = {action.stage for action in self.run if action.phase is Phase.WEIGHT}
        for stage in range(len(self.placement)):
            for phase in phases if stage in split else phases - {Phase.WEIGHT}:
                for m in microbatches:
                    if Compute(stage, phase, m) not in self.run:
                        raise ScheduleError(f"{Compute(stage, phase, m)} is missing")
