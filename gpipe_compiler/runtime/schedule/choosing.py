"""Every schedule by its kind: where it puts the stages, and its generator."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..spec import ScheduleKind
from .actions import Orders
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b


def placement_for(kind: ScheduleKind, stages: int, devices: int) -> tuple[int, ...]:
    """The device of each stage.

    Raises:
        ValueError: when so many stages cannot be put on so many devices.
    """
    if devices < 1 or stages % devices:
        raise ValueError(f"{stages} stages cannot be spread over {devices} devices")
    return tuple(stage * devices // stages for stage in range(stages))


def devices_for(kind: ScheduleKind, stages: int) -> int:
    """How many devices the schedule needs for so many stages, unless somebody says otherwise.

    Raises:
        ValueError: when it cannot have so many stages.
    """
    return stages


def splits_backward(kind: ScheduleKind) -> bool:
    """Whether its stages have WEIGHT actions."""
    return kind in (ScheduleKind.ZB_H1, ScheduleKind.ZBV)


def orders_for(
    kind: ScheduleKind,
    placement: Sequence[int],
    microbatches: int,
    joint: Collection[int] = (),
) -> Orders:
    """Each device's actions in training.

    Raises:
        ValueError: for a placement or a number of micro-batches that the schedule cannot have.
    """
    if kind is ScheduleKind.GPIPE:
        return gpipe(placement, microbatches, joint)
    return one_f_one_b(placement, microbatches)
