"""Schedules made ready to run: generated or taken from the package, lowered, proved, wired."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..schedule import forward_only, lower, orders_for, prove
from ..schedule.actions import Compute, Orders, Phase, Programs, parse_order
from ..spec import BatchNorm, Crossing, PipelineSpec, ScheduleKind
from .full_batch import joint_stages
from .request import RunRequest
from .topology import Topology, planned_placement
from .wiring import ActionStep, StageWiring, crossings_for, inputs_for, steps_of, wire


@dataclass(frozen=True)
class PreparedSchedule:
    """A schedule for one placement, proved to end.

    Attributes:
        placement: the device of each stage.
        steps: every device's program, with the places where values are let go.
        inputs: the inputs of the pipeline that it reads.
    """

    placement: tuple[int, ...]
    microbatches: int
    work: RunRequest
    crossings: tuple[Crossing, ...]
    wiring: tuple[StageWiring, ...]
    programs: Programs
    steps: tuple[tuple[ActionStep, ...], ...]
    inputs: frozenset[str]

    @property
    def devices(self) -> int:
        """How many devices take part."""
        return len(self.programs)

    def loss_weights(self, shares: Sequence[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
        """The weights of the losses that are made: a joint stage makes one, for all micro-batches.

        Args:
            shares: of the micro-batches in the terms of the loss, which one loss has whole.
        """
        if not any(stage.makes_loss and stage.joint is not None for stage in self.wiring):
            return tuple(shares)
        whole = tuple(float(any(column)) for column in zip(*shares, strict=True))
        return (whole, *(tuple(0.0 for _ in whole) for _ in shares[1:]))


def prepare(
    spec: PipelineSpec,
    placement: Sequence[int],
    microbatches: int,
    work: RunRequest,
    schedule: ScheduleKind,
    shared: Mapping[str, Sequence[int]],
    joint: Collection[int] = (),
    wanted: frozenset[str] = frozenset(),
) -> PreparedSchedule:
    """A schedule ready to run.

    Args:
        schedule: of training; without gradients micro-batches just flow through.
        shared: trainable parameters with several owners, and these.
        joint: the stages that take all micro-batches as one.
        wanted: the inputs whose gradients the caller wants.

    Raises:
        UsageError: for a number of micro-batches that makes no sense, or a schedule that does not
            go with joint stages.
        DeadlockError, ScheduleError: when the package's own orders are wrong.
    """
    if microbatches < 1:
        raise UsageError(f"{microbatches} micro-batches: at least one is needed")
    if microbatches == 1:
        joint = ()
    in_a_row = list(placement) == sorted(placement)
    if joint and not (
        in_a_row and (schedule is ScheduleKind.GPIPE or work is not RunRequest.TRAIN)
    ):
        raise UsageError(
            f"exact BatchNorm does not go with the schedule {schedule.value}: every micro-batch "
            "must have gone through a stage before the first goes on, forward or back",
            hint="use --schedule gpipe, or --batchnorm deferred",
        )
    crossings = crossings_for(spec, work, wanted)
    orders = _orders(spec, placement, microbatches, work, schedule, joint)
    sums = shared if work is RunRequest.TRAIN else {}
    programs = lower(orders, placement, crossings, sums, joint)
    prove(programs, placement, crossings, joint)
    wiring = wire(spec, placement, work, joint, _split(programs), wanted)
    return PreparedSchedule(
        placement=tuple(placement),
        microbatches=microbatches,
        work=work,
        crossings=crossings,
        wiring=wiring,
        programs=programs,
        steps=tuple(steps_of(program, wiring) for program in programs),
        inputs=inputs_for(spec, work),
    )


def _orders(
    spec: PipelineSpec,
    placement: Sequence[int],
    microbatches: int,
    work: RunRequest,
    schedule: ScheduleKind,
    joint: Collection[int],
) -> Orders:
    if work is not RunRequest.TRAIN:
        return forward_only(placement, microbatches, joint)
    planned = (spec.schedule, spec.microbatches, planned_placement(spec))
    # Without joint stages a device may have been meant to take its stages in turn.
    fitting = not joint or spec.batchnorm is BatchNorm.EXACT
    if spec.orders and fitting and (schedule, microbatches, tuple(placement)) == planned:
        return tuple(parse_order(order) for order in spec.orders)
    try:
        return orders_for(schedule, placement, microbatches, joint)
    except ValueError as error:
        raise UsageError(str(error), hint="use another --schedule") from error


def _split(programs: Programs) -> frozenset[int]:
    """The stages whose backward is in two parts."""
    return frozenset(
        action.stage
        for program in programs
        for action in program
        if isinstance(action, Compute) and action.phase is Phase.WEIGHT
    )


class ProgramCache:
    """The schedules of a pipeline, each made and proved when it is first asked for.

    Args:
        owners: trainable parameters of several stages, and these.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        topology: Topology,
        schedule: ScheduleKind,
        batchnorm: BatchNorm,
        owners: Mapping[str, Sequence[int]],
    ) -> None:
        self._spec = spec
        self._topology = topology
        self._schedule = schedule
        self._batchnorm = batchnorm
        self._owners = owners
        self._known: dict[
            tuple[RunRequest, int, frozenset[int], frozenset[str]], PreparedSchedule
        ] = {}

    def of(
        self,
        work: RunRequest,
        microbatches: int,
        *,
        training: bool,
        wanted: frozenset[str] = frozenset(),
    ) -> PreparedSchedule:
        """The programs for so many micro-batches, of stages in this mode.

        Args:
            wanted: the inputs whose gradients the caller wants.

        Raises:
            UsageError: when there are none in this manner.
            ScheduleError, DeadlockError: when the package's own orders are wrong.
        """
        exact = self._batchnorm is BatchNorm.EXACT and training
        joint = joint_stages(self._spec.stages, self._topology.replicas) if exact else frozenset()
        key = work, microbatches, joint, wanted
        if key not in self._known:
            placement = self._topology.placement
            self._known[key] = prepare(
                self._spec,
                placement,
                microbatches,
                work,
                self._schedule,
                self._owners,
                joint,
                wanted,
            )
        return self._known[key]
