"""Schedules made ready to run: generated or taken from the package, lowered, wired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import UsageError
from ..schedule import forward_only, lower, orders_for
from ..schedule.actions import Orders, parse_order, split_stages
from ..spec import BatchNorm, Crossing, PipelineSpec, ScheduleKind
from .full_batch import joint_stages
from .request import RunRequest
from .topology import Topology, planned_placement
from .wiring import ActionStep, StageWiring, crossings_for, steps_of, wire


@dataclass(frozen=True)
class PreparedSchedule:
    """A schedule for one placement.

    Attributes:
        placement: the device of each stage.
        steps: every device's program, with the places where values are let go.
    """

    placement: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    wiring: tuple[StageWiring, ...]
    steps: tuple[tuple[ActionStep, ...], ...]

    @property
    def makes_one_loss(self) -> bool:
        """Whether a joint stage makes the loss, for all micro-batches."""
        return any(stage.makes_loss and stage.joint is not None for stage in self.wiring)


_Key: TypeAlias = tuple[RunRequest, int, frozenset[int], frozenset[str], frozenset[str], int | None]


@dataclass(eq=False)
class ProgramCache:
    """The schedules of a pipeline, each made when it is first asked for.

    Args:
        schedule: of training; without gradients micro-batches just flow through.
        owners: trainable parameters of several stages, and these.
    """

    _spec: PipelineSpec
    _topology: Topology
    _schedule: ScheduleKind
    _batchnorm: BatchNorm
    _owners: Mapping[str, Sequence[int]]
    _known: dict[_Key, PreparedSchedule] = field(default_factory=dict, init=False)

    def of(
        self,
        work: RunRequest,
        microbatches: int,
        *,
        training: bool,
        wanted: frozenset[str] = frozenset(),
        held: frozenset[str] = frozenset(),
        unfrozen: int | None = None,
    ) -> PreparedSchedule:
        """The programs for a number of micro-batches, of stages in this mode.

        Args:
            wanted: the inputs whose gradients the caller wants.
            held: those that are where they are read, from an earlier call.
            unfrozen: the first stage that trains what was not trained as it was compiled.

        Raises:
            UsageError: for a number of micro-batches that makes no sense, or a schedule that does
                not go with joint stages.
            ScheduleError, DeadlockError: when the package's own orders are wrong.
        """
        exact = self._batchnorm is BatchNorm.EXACT and training
        joint = joint_stages(self._spec.stages, self._topology.replicas) if exact else frozenset()
        loss = self._spec.loss
        if loss is not None and loss.over_batch and work.makes_loss and not joint:
            if training and microbatches > 1:
                raise UsageError(
                    f"the loss of {self._spec.name} is that of the whole mini-batch, which "
                    f"batchnorm={self._batchnorm.value!r} does not hold together",
                    hint="leave batchnorm as it is planned, or use microbatches=1",
                )
            joint = frozenset({len(self._spec.stages) - 1})
        if microbatches == 1:
            joint = frozenset()
        key = work, microbatches, joint, wanted, held, unfrozen
        if key not in self._known:
            self._known[key] = self._prepared(*key)
        return self._known[key]

    def _prepared(
        self,
        work: RunRequest,
        microbatches: int,
        joint: frozenset[int],
        wanted: frozenset[str],
        held: frozenset[str],
        unfrozen: int | None,
    ) -> PreparedSchedule:
        spec, placement = self._spec, self._topology.placement
        crossings = crossings_for(spec, work, wanted, held, unfrozen)
        orders = self._orders(work, microbatches, joint)
        sums = self._owners if work is RunRequest.TRAIN else {}
        programs = lower(orders, placement, crossings, sums, joint)
        wiring = wire(spec, placement, work, joint, split_stages(orders), wanted, held, unfrozen)
        steps = tuple(steps_of(program, wiring) for program in programs)
        return PreparedSchedule(placement, crossings, wiring, steps)

    def _orders(self, work: RunRequest, microbatches: int, joint: frozenset[int]) -> Orders:
        spec, schedule, placement = self._spec, self._schedule, self._topology.placement
        if microbatches < 1:
            raise UsageError(f"{microbatches} micro-batches: at least one is needed")
        in_a_row = list(placement) == sorted(placement)
        pipelined = schedule is not ScheduleKind.GPIPE and work is RunRequest.TRAIN
        if joint and (pipelined or not in_a_row):
            over_batch = spec.loss is not None and spec.loss.over_batch
            what = "a loss over the whole batch" if over_batch else "exact BatchNorm"
            raise UsageError(
                f"{what} does not go with the schedule {schedule.value}: every "
                "micro-batch must have gone through a stage before the first goes on, forward or "
                "back",
                hint=f"use --schedule gpipe{'' if over_batch else ', or --batchnorm deferred'}",
            )
        if work is not RunRequest.TRAIN:
            return forward_only(placement, microbatches, joint)
        planned = (spec.schedule, spec.microbatches, planned_placement(spec))
        # Without joint stages a device may have been meant to take its stages in turn.
        fitting = not joint or spec.batchnorm is BatchNorm.EXACT
        if spec.orders and fitting and (schedule, microbatches, placement) == planned:
            return tuple(parse_order(order) for order in spec.orders)
        try:
            return orders_for(schedule, placement, microbatches, joint)
        except ValueError as error:
            raise UsageError(str(error), hint="use another --schedule") from error
