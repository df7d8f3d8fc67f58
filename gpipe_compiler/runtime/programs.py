"""Schedules made ready to run: generated or taken from the package, lowered, proved, wired."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from .errors import UsageError
from .job import Work
from .schedule import forward_only, gpipe, lower, one_f_one_b, prove
from .schedule.actions import Orders, Programs, parse_order
from .spec import Crossing, PipelineSpec, ScheduleKind
from .wiring import StageWiring, Step, crossings_for, inputs_for, steps_of, wire

GENERATORS: Mapping[ScheduleKind, Callable[[Sequence[int], int], Orders]] = {
    ScheduleKind.GPIPE: gpipe,
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
}


@dataclass(frozen=True)
class Prepared:
    """A schedule for one placement, proved to end.

    Attributes:
        placement: the device of each stage.
        steps: every device's program, with the places where values are let go.
        inputs: the inputs of the pipeline that it reads.
    """

    placement: tuple[int, ...]
    microbatches: int
    work: Work
    crossings: tuple[Crossing, ...]
    wiring: tuple[StageWiring, ...]
    programs: Programs
    steps: tuple[tuple[Step, ...], ...]
    inputs: frozenset[str]

    @property
    def devices(self) -> int:
        """How many devices take part."""
        return len(self.programs)

    def loss_weights(self, shares: Sequence[float]) -> tuple[float, ...]:
        """The weights of the losses that are made: a joint stage makes one, for all micro-batches.

        Args:
            shares: of the micro-batches in the loss of the mini-batch, which one loss has whole.
        """
        if not any(stage.makes_loss and stage.joint is not None for stage in self.wiring):
            return tuple(shares)
        return (1.0 if any(shares) else 0.0, *(0.0 for _ in shares[1:]))


def spread(stages: int, devices: int) -> tuple[int, ...]:
    """The device of each stage when each device holds equally many consecutive ones.

    Raises:
        UsageError: when the devices do not divide the stages.
    """
    if devices < 1 or stages % devices:
        raise UsageError(
            f"{stages} stages cannot be spread over {devices} devices or processes",
            hint=f"use a number that divides {stages}",
        )
    return tuple(stage * devices // stages for stage in range(stages))


def prepare(
    spec: PipelineSpec,
    placement: Sequence[int],
    microbatches: int,
    work: Work,
    schedule: ScheduleKind,
    shared: Mapping[str, Sequence[int]],
    joint: Collection[int] = (),
) -> Prepared:
    """A schedule ready to run.

    Args:
        schedule: of training; without gradients micro-batches just flow through.
        shared: trainable parameters with several owners, and these.
        joint: the stages that take all micro-batches as one.

    Raises:
        UsageError: for a number of micro-batches that makes no sense, or a schedule that does not
            go with joint stages.
        DeadlockError, ScheduleError: when the package's own orders are wrong.
    """
    if microbatches < 1:
        raise UsageError(f"{microbatches} micro-batches: at least one is needed")
    if microbatches == 1:
        joint = ()
    if joint and work is Work.TRAIN and schedule is not ScheduleKind.GPIPE:
        raise UsageError(
            f"exact BatchNorm does not go with the schedule {schedule.value}: every micro-batch "
            "must have gone forward before the first comes back",
            hint="use --schedule gpipe, or --batchnorm deferred",
        )
    crossings = crossings_for(spec, work)
    orders = _orders(spec, placement, microbatches, work, schedule, joint)
    sums = shared if work is Work.TRAIN else {}
    programs = lower(orders, placement, crossings, sums, joint)
    prove(programs, placement, crossings, joint)
    wiring = wire(spec, placement, work, joint)
    return Prepared(
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
    work: Work,
    schedule: ScheduleKind,
    joint: Collection[int],
) -> Orders:
    if work is not Work.TRAIN:
        return forward_only(placement, microbatches, joint)
    one_stage_each = tuple(placement) == tuple(range(len(spec.stages)))
    planned = (schedule, microbatches) == (spec.schedule, spec.microbatches)
    if spec.orders and one_stage_each and planned:
        return tuple(parse_order(order) for order in spec.orders)
    if joint:
        return gpipe(placement, microbatches, joint)
    return GENERATORS[schedule](placement, microbatches)
