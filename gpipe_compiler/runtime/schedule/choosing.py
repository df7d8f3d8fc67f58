"""Every schedule by its kind: where it puts the stages, and its generator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..wording import counted
from .actions import Orders
from .gpipe import gpipe
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b, zb_h1
from .placement import in_blocks, in_rounds, in_v
from .zbv import zbv


class ScheduleKind(Enum):
    """The schedules that the runtime can generate, by the name a user types."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is to be known of a schedule.

    Attributes:
        order: each device's actions in training, of the device of each stage and the number of
            micro-batches. Raises ValueError for what the schedule cannot have.
        place: the device of each stage, of the numbers of stages and of devices. Raises ValueError
            naming what could be.
        stages_a_device: the numbers that a search looks at; the first where nobody says otherwise.
        splits_backward: its stages have WEIGHT actions.
        for_one_device: a search looks at it on one device too.
    """

    order: Callable[[Sequence[int], int], Orders]
    place: Callable[[int, int], tuple[int, ...]] = in_blocks
    stages_a_device: tuple[int, ...] = (1,)
    splits_backward: bool = False
    for_one_device: bool = False


SCHEDULES: Mapping[ScheduleKind, Schedule] = {
    ScheduleKind.GPIPE: Schedule(gpipe, for_one_device=True),
    ScheduleKind.ONE_F_ONE_B: Schedule(one_f_one_b, for_one_device=True),
    ScheduleKind.INTERLEAVED: Schedule(interleaved, in_rounds, (2, 4)),
    ScheduleKind.ZB_H1: Schedule(zb_h1, splits_backward=True),
    ScheduleKind.ZBV: Schedule(zbv, in_v, (2,), splits_backward=True),
}


def placement_for(kind: ScheduleKind, stages: int, devices: int) -> tuple[int, ...]:
    """The device of each stage.

    Raises:
        ValueError: when the stages cannot be put on that many devices, naming what could be.
    """
    if stages < 1 or devices < 1:
        raise ValueError(f"{stages} stages on {devices} devices: at least one of each is needed")
    try:
        return SCHEDULES[kind].place(stages, devices)
    except ValueError as error:
        raise ValueError(f"{kind.value} needs {error}") from None


def devices_for(kind: ScheduleKind, stages: int) -> int:
    """How many devices a number of stages needs, unless somebody says otherwise.

    Raises:
        ValueError: when it cannot have that many stages.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages: at least one is needed")
    each = SCHEDULES[kind].stages_a_device[0]
    if stages % each:
        raise ValueError(
            f"{kind.value} has {each} stages a device: {counted(stages, 'stage')} cannot be "
            f"dealt so, {stages + each - stages % each} can"
        )
    return stages // each


def splits_backward(kind: ScheduleKind) -> bool:
    return SCHEDULES[kind].splits_backward


def orders_for(
    kind: ScheduleKind, placement: Sequence[int], microbatches: int, joint: Collection[int] = ()
) -> Orders:
    """Each device's actions in training.

    Raises:
        ValueError: for a placement, a number of micro-batches or joint stages that the schedule
            cannot have.
    """
    if not joint:
        return SCHEDULES[kind].order(placement, microbatches)
    if kind is not ScheduleKind.GPIPE:
        raise ValueError(f"{kind.value} cannot take all micro-batches of a stage as one: gpipe can")
    return gpipe(placement, microbatches, joint)
