"""Schedules made ready to run: generated or taken from the package, lowered, proved, wired."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
) -> Prepared:
    """A schedule ready to run.

    Args:
        schedule: of training; without gradients micro-batches just flow through.
        shared: trainable parameters with several owners, and these.

    Raises:
        UsageError: for a number of micro-batches that makes no sense.
        DeadlockError, ScheduleError: when the package's own orders are wrong.
    """
    if microbatches < 1:
        raise UsageError(f"{microbatches} micro-batches: at least one is needed")
    crossings = crossings_for(spec, work)
    orders = _orders(spec, placement, microbatches, work, schedule)
    programs = lower(orders, placement, crossings, shared if work is Work.TRAIN else {})
    prove(programs, placement, crossings)
    wiring = wire(spec, placement, work)
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
) -> Orders:
    if work is not Work.TRAIN:
        return forward_only(placement, microbatches)
    one_stage_each = tuple(placement) == tuple(range(len(spec.stages)))
    planned = (schedule, microbatches) == (spec.schedule, spec.microbatches)
    if spec.orders and one_stage_each and planned:
        return tuple(parse_order(order) for order in spec.orders)
    return GENERATORS[schedule](placement, microbatches)
