"""The time of a step under a schedule.

The cost model, which the cut minimises and the report quotes:

- A stage computes on its device, one action at a time, in the order the schedule fixes.
- What a stage receives for one micro-batch comes through its *port*, one micro-batch after the
  other, in latency + bytes / bandwidth for every value; a value is counted once for every stage
  that receives it, whichever stage sends it. Gradients of received values leave through the same
  port in the other direction. Both directions work at once, and besides the devices' computing.
- Stages stand in a line: stage i receives a micro-batch when stage i-1 has computed it, and i-1
  gets its gradients when i has sent them. (Values that come from further back are there already;
  stages that could run side by side are taken to run one after the other.)
- A stage that recomputes runs its forward again before a backward, as soon as its device is free:
  it has what it received, and need not wait for the gradient. `recomputed` says before which
  backwards.
- Where a schedule splits the backward, its first part, which makes the gradients of what the stage
  received, takes backward - weight, and its second part, at a later time, weight.
- After its last action a stage updates its parameters: replicas reduce gradients, the optimizer
  steps. The stages of a device do so one after another; other devices go on meanwhile.
- What a stage receives from another stage of its own device takes no time (the caller says so, by
  times of zero).
- A joint stage starts when it has received all micro-batches, and hands nothing on before it has
  computed all of them; it takes as long for each as it would alone.

So one micro-batch passes the machines receive 0, forward 0, receive 1, forward 1, ... and then
backward K-1, gradient K-1, backward K-2, ...: two flow lines, joined by the order of every device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_compiler.errors import PlanError
from gpipe_compiler.runtime.errors import DeadlockError
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase, split_stages
from gpipe_compiler.runtime.schedule.clock import Needs, timeline
from gpipe_compiler.runtime.schedule.joint import Joint, waiting

FEW = 8
"""So few pipelines are worked out one by one, sooner than together in arrays."""

FORWARD, WEIGHT = Phase.FORWARD, Phase.WEIGHT


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch in one stage.

    Attributes:
        backward_s: both parts of it.
        receive_s: what comes through its port before `forward_s` can start.
        gradient_s: what leaves through its port after `backward_s`.
        recompute_s: what the device runs again before `backward_s`, where it has to.
        weight_s: the part of `backward_s` that makes the gradients of parameters.
        update_s: once a step, after the stage's last action.
    """

    forward_s: float
    backward_s: float = 0.0
    receive_s: float = 0.0
    gradient_s: float = 0.0
    recompute_s: float = 0.0
    weight_s: float = 0.0
    update_s: float = 0.0


class Lane(Enum):
    """Where a span of time is spent."""

    DEVICE = "device"
    UPDATE = "update"
    RECEIVE = "receive"
    GRADIENT = "gradient"


class Span(NamedTuple):
    """One action's time: on the device numbered `device`, or on the port of the action's stage.

    The action of an update is the last one of its stage.

    Attributes:
        recompute: whether the device runs the forward again that this backward needs.
    """

    lane: Lane
    device: int
    action: Compute
    start_s: float
    end_s: float
    recompute: bool = False


@dataclass(frozen=True)
class Simulation:
    """What a step takes.

    Attributes:
        step_s: from the first action's start to the last action's end, transfers and updates
            included.
        busy_s: for every device, seconds spent computing, recomputing included.
        timeline: every span that takes time on a port or recomputes, and every action of a
            device, in the order they are worked out (which is topological, not chronological).
    """

    step_s: float
    busy_s: tuple[float, ...]
    timeline: tuple[Span, ...]

    @property
    def recompute_s(self) -> tuple[float, ...]:
        """For every device, seconds spent running forwards again."""
        again = [0.0] * len(self.busy_s)
        for span in self.timeline:
            if span.recompute:
                again[span.device] += span.end_s - span.start_s
        return tuple(again)

    @property
    def bubble(self) -> float:
        """The share of all devices' time spent waiting, 0 to 1."""
        whole = self.step_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / whole if whole > 0 else 0.0


def recomputed(orders: Orders, joint: Collection[int] = ()) -> frozenset[Compute]:
    """The backwards before which a stage under full remat runs its forward again.

    Not those that do not wait, such as GPipe's for the last micro-batch (`schedule.waiting`).
    """
    return frozenset(
        Compute(stage, Phase.BACKWARD, microbatch)
        for order in orders
        for stage, microbatch in waiting(order, joint)
    )


def _line(orders: Orders) -> Needs:
    """What actions wait for where stages stand in a line; that which comes last is last."""
    last = max((action.stage for order in orders for action in order), default=0)
    following = range(1, last + 1)
    return Needs({s: (s - 1,) for s in following}, {s - 1: (s,) for s in following})


def _sequence(orders: Orders, needs: Needs) -> list[tuple[int, Compute]]:
    """All actions with their devices, every one after those it waits for."""
    try:
        return [(timed.device, timed.action) for timed in timeline(orders, needs)]
    except DeadlockError as error:
        device, action = error.stuck[0]
        raise PlanError(f"device {device} would wait for ever before {action}") from error


ActionRates = Mapping[tuple[Compute, bool], float]
"""How many times as long as usual an action takes, or (True) running the forward again for it."""

STEADY: ActionRates = MappingProxyType({})
"""Every action takes the time of its stage."""


def simulate(
    orders: Orders,
    times: Sequence[StageTimes],
    joint: Collection[int] = (),
    pace: ActionRates = STEADY,
) -> Simulation:
    """Works out when every action of a schedule starts and ends.

    Args:
        orders: each device's actions; devices may hold several stages, which then share it.
        times: one per stage; transfers between stages of one device are up to the caller to
            count as nothing.
        joint: the stages that take all micro-batches as one.
        pace: of actions that do not take what all others of their stage take.

    Raises:
        PlanError: when some device would wait for ever.
    """
    run = _Run(times, orders, Joint.of(joint, orders), pace)
    again = recomputed(orders, joint) if any(stage.recompute_s for stage in times) else frozenset()
    for device, action in _sequence(orders, dataclasses.replace(run.line, joint=run.joint)):
        arrival = run.arrive(device, action)
        run.compute(device, action, arrival, again=action in again)
    run.update()
    step = max((span.end_s for span in run.timeline), default=0.0)
    return Simulation(step, tuple(run.busy), tuple(run.timeline))


class _Run:
    """The devices and ports while a schedule is simulated, action by action."""

    def __init__(
        self, times: Sequence[StageTimes], orders: Orders, joint: Joint, pace: ActionRates
    ) -> None:
        self.pace = pace
        self.times = times
        self.joint = joint
        self.line = _line(orders)
        self.split = split_stages(orders)
        self.busy = [0.0] * len(orders)
        self.timeline: list[Span] = []
        self._device_free = [0.0] * len(orders)
        self._receive_free = [0.0] * len(times)
        self._gradient_free = [0.0] * len(times)
        self._ready: dict[Compute, float] = {}

    def arrive(self, device: int, action: Compute) -> float:
        """When all that the action waits for has come through its stage's port."""
        stage = action.stage
        if action.phase is Phase.WEIGHT:
            return 0.0  # it waits for its device alone, not for the gradient to have been sent
        receive_s = self.times[stage].receive_s if action.phase is Phase.FORWARD else 0.0
        arrival = 0.0
        for received in _each(action, _begun(self.joint, action)):
            needed = self.line.of(received)
            came = self._ready[needed[-1]] if needed else 0.0
            if receive_s > 0:
                start = max(came, self._receive_free[stage])
                came = self._receive_free[stage] = start + receive_s
                self.timeline.append(Span(Lane.RECEIVE, device, received, start, came))
            arrival = max(arrival, came)
        return arrival

    def compute(self, device: int, action: Compute, arrival: float, *, again: bool) -> None:
        stage = self.times[action.stage]
        recompute_s = stage.recompute_s * len(_begun(self.joint, action)) if again else 0.0
        if recompute_s > 0:
            self._work(device, action, self._device_free[device], recompute_s, recompute=True)
        start = max(arrival, self._device_free[device])
        self._work(device, action, start, self._seconds(action))
        for made in _each(action, self.joint.completed(action)):
            end = self._device_free[device]
            if action.phase is Phase.BACKWARD and stage.gradient_s > 0:
                start = max(end, self._gradient_free[action.stage])
                end = self._gradient_free[action.stage] = start + stage.gradient_s
                self.timeline.append(Span(Lane.GRADIENT, device, made, start, end))
            self._ready[made] = end

    def _seconds(self, action: Compute) -> float:
        stage = self.times[action.stage]
        if action.phase is Phase.FORWARD:
            return stage.forward_s
        if action.phase is Phase.WEIGHT:
            return stage.weight_s
        return stage.backward_s - (stage.weight_s if action.stage in self.split else 0.0)

    def update(self) -> None:
        """After the last actions: each device updates its stages, in the order they have ended."""
        last = {span.action.stage: span for span in self.timeline if span.lane is Lane.DEVICE}
        for stage, span in sorted(last.items(), key=lambda item: item[1].end_s):
            seconds = self.times[stage].update_s
            if seconds > 0:
                start = self._device_free[span.device]
                end = self._device_free[span.device] = start + seconds
                self.timeline.append(Span(Lane.UPDATE, span.device, span.action, start, end))

    def _work(
        self, device: int, action: Compute, start: float, seconds: float, *, recompute: bool = False
    ) -> None:
        if self.pace:
            seconds *= self.pace.get((action, recompute), 1.0)
        end = self._device_free[device] = start + seconds
        self.busy[device] += seconds
        self.timeline.append(Span(Lane.DEVICE, device, action, start, end, recompute=recompute))


def _begun(joint: Joint, action: Compute) -> tuple[int, ...]:
    """The micro-batches whose inputs have to be there when an action starts.

    Its own; in a joint stage all with the first action, and none with the others.
    """
    if action.stage not in joint.stages:
        return (action.microbatch,)
    numbers = joint.order[action.stage, action.phase]
    return numbers if numbers[0] == action.microbatch else ()


def _each(action: Compute, microbatches: Sequence[int]) -> Sequence[Compute]:
    if len(microbatches) == 1 and microbatches[0] == action.microbatch:
        return (action,)
    return [Compute(action.stage, action.phase, microbatch) for microbatch in microbatches]


class Steps:
    """`simulate(...).step_s` of many pipelines under one schedule.

    Raises:
        PlanError: when some device would wait for ever.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._split = split_stages(orders)
        again, line = recomputed(orders), _line(orders)
        actions = _sequence(orders, line)
        number = {action: place for place, (_, action) in enumerate(actions)}
        self._sequence = tuple(
            (
                device,
                *action[:2],
                number[needed[-1]] if (needed := line.of(action)) else -1,
                action in again,
            )
            for device, action in actions
        )

    def __call__(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The steps.

        Args:
            times: shape (pipelines, stages, 7), the last dimension as the fields of `StageTimes`.
        """
        if len(times) <= FEW:
            return np.array([self._step(pipeline, 0.0, max) for pipeline in times.tolist()])
        rows = [tuple(row) for row in np.ascontiguousarray(times.transpose(1, 2, 0))]
        return np.asarray(self._step(rows, np.zeros(len(times)), np.maximum))

    def _step(self, rows: Sequence[Sequence[Any]], nothing: Any, larger: Callable[..., Any]) -> Any:
        """The step of one pipeline by numbers, or of many by arrays."""
        device_free = [nothing] * len(self._orders)
        receive_free, gradient_free = ([nothing] * len(rows) for _ in range(2))
        ready = [nothing] * (len(self._sequence) + 1)  # the last one is of what waits for nothing
        for number, (device, stage, phase, needed, again) in enumerate(self._sequence):
            forward_s, backward_s, receive_s, gradient_s, recompute_s, weight_s, _ = rows[stage]
            free, arrival = device_free[device], ready[needed]
            if phase is FORWARD:
                arrival = receive_free[stage] = larger(arrival, receive_free[stage]) + receive_s
                end = device_free[device] = larger(arrival, free) + forward_s
            elif phase is WEIGHT:
                end = device_free[device] = free + weight_s
            else:
                computed = larger(arrival, free + recompute_s if again else free) + backward_s
                if stage in self._split:
                    computed = computed - weight_s
                device_free[device] = computed
                end = gradient_free[stage] = larger(computed, gradient_free[stage]) + gradient_s
            ready[number] = end
        for device, order in enumerate(self._orders):
            for stage in {action.stage for action in order}:
                device_free[device] = device_free[device] + rows[stage][6]
        return functools.reduce(larger, [nothing, *device_free, *receive_free, *gradient_free])
