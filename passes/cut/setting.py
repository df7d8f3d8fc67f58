"""What the stages of a cut run on, and how: devices, links, schedule, and what is to be short."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from gpipe_compiler.cluster import NO_LINK, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.options import Objective
from gpipe_compiler.runtime.schedule import forward_only
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.schedule.choosing import (
    devices_for,
    orders_for,
    placement_for,
    splits_backward,
)
from gpipe_compiler.runtime.spec import ScheduleKind


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """A device that stages may run on.

    Attributes:
        kind: whose times hold here: 0 for those of the nodes, else `other_kinds[kind - 1]`.
        memory: bytes it holds.
        host: of the machine it is in; the devices of a host stay together in a pipeline, as
            torchrun numbers processes.
        update_s_per_byte: seconds per byte of trained parameters, after the last backward of a
            stage: reducing over replicas, and the optimizer.
        update_latency_s: seconds besides, for a stage with anything to update.
    """

    kind: int = 0
    memory: float = math.inf
    host: int = 0
    update_s_per_byte: float = 0.0
    update_latency_s: float = 0.0


@dataclass(frozen=True)
class CutSetting:
    """What a cut is for.

    Attributes:
        kind: of the schedule in training; None for inference.
        stages: how many there are to be; none is empty.
        slots: the devices there are, at least as many as the pipeline has. Which of them it has,
            and in which order, is for the cut to find where they differ.
        devices: of the pipeline; None for as many as the schedule needs.
        recompute: for every stage, whether it runs its forward again before a backward.
        objective: the quantity to minimise, among cuts that fit into memory.
        slots_in_order: whether the first slots are taken, in order, though they differ.
    """

    kind: ScheduleKind | None
    stages: int
    microbatches: int
    slots: tuple[DeviceSlot, ...]
    links: tuple[tuple[Link, ...], ...]
    devices: int | None = None
    recompute: tuple[bool, ...] = ()
    objective: Objective = Objective.STEP
    slots_in_order: bool = False

    @classmethod
    def equal(
        cls,
        kind: ScheduleKind | None,
        stages: int,
        microbatches: int,
        link: Link,
        slot: DeviceSlot = DeviceSlot(),
    ) -> CutSetting:
        """Equal devices, one for every stage, and equal links."""
        row = range(stages)
        links = tuple(tuple(NO_LINK if a == b else link for b in row) for a in row)
        return cls(kind, stages, microbatches, (slot,) * stages, links, stages)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The device of the pipeline that each stage runs on.

        Raises:
            PlanError: when the schedule cannot place that many stages.
        """
        kind = self.kind or ScheduleKind.GPIPE
        try:
            devices = self.devices or devices_for(kind, self.stages)
            return placement_for(kind, self.stages, devices)
        except ValueError as error:
            raise PlanError(str(error)) from error

    @cached_property
    def orders(self) -> Orders:
        """Each device's actions, where no stage is joint.

        Raises:
            PlanError: when the schedule cannot have that many stages or micro-batches.
        """
        return self.orders_with(())

    def orders_with(self, joint: Collection[int]) -> Orders:
        """Each device's actions.

        Args:
            joint: the stages that take all micro-batches as one.

        Raises:
            PlanError: when the schedule cannot have that many stages or micro-batches, or these
                joint ones.
        """
        try:
            if self.kind is None:
                return forward_only(self.placement, self.microbatches, joint)
            return orders_for(self.kind, self.placement, self.microbatches, joint)
        except ValueError as error:
            raise PlanError(str(error)) from error

    @property
    def limited(self) -> bool:
        """Whether any device's memory is."""
        return any(math.isfinite(slot.memory) for slot in self.slots)

    def unlimited(self) -> CutSetting:
        """The same on devices that hold anything."""
        return replace(self, slots=tuple(replace(slot, memory=math.inf) for slot in self.slots))

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of parameters are made by actions of their own."""
        return self.kind is not None and splits_backward(self.kind)
