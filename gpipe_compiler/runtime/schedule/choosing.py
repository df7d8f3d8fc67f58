"""Every schedule by its kind: where it puts the stages, and its generator."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..spec import ScheduleKind
from ..wording import counted
from .actions import Orders
from .gpipe import gpipe
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b
from .zb_h1 import zb_h1
from .zbv import zbv


def placement_for(kind: ScheduleKind, stages: int, devices: int) -> tuple[int, ...]:
    """The device of each stage.

    Raises:
        ValueError: when so many stages cannot be put on so many devices, naming what could be.
    """
    if stages < 1 or devices < 1:
        raise ValueError(f"{stages} stages on {devices} devices: at least one of each is needed")
    if kind is ScheduleKind.INTERLEAVED:
        if stages % devices or stages < 2 * devices:
            raise ValueError(
                f"interleaved needs a multiple of the devices, twice as many or more: {stages} "
                f"stages do not go on {devices} devices, {_near(stages, devices, 2)} would"
            )
        return tuple(stage % devices for stage in range(stages))
    if kind is ScheduleKind.ZBV:
        if stages != 2 * devices:
            raise ValueError(
                f"zbv needs two stages a device: {stages} stages do not go on {devices} "
                f"devices, {2 * devices} would"
            )
        return (*range(devices), *reversed(range(devices)))
    if stages % devices:
        raise ValueError(
            f"{kind.value} needs a multiple of the devices: {stages} stages do not go on {devices} "
            f"devices, {_near(stages, devices, 1)} would"
        )
    return tuple(stage * devices // stages for stage in range(stages))


def _near(stages: int, devices: int, least: int) -> str:
    """The multiples of the devices next to the number of stages, from `least` times them up."""
    below = stages // devices
    if below < least:
        return str(least * devices)
    return f"{below * devices} or {(below + 1) * devices}"


def devices_for(kind: ScheduleKind, stages: int) -> int:
    """How many devices the schedule needs for so many stages, unless somebody says otherwise.

    Raises:
        ValueError: when it cannot have so many stages.
    """
    if stages < 1:
        raise ValueError(f"{stages} stages: at least one is needed")
    if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV):
        if stages % 2:
            raise ValueError(
                f"{kind.value} has two stages a device: {counted(stages, 'stage')} cannot be "
                f"paired, {stages + 1} can"
            )
        return stages // 2
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
        ValueError: for a placement, a number of micro-batches or joint stages that the schedule
            cannot have.
    """
    if kind is ScheduleKind.GPIPE:
        return gpipe(placement, microbatches, joint)
    if joint:
        raise ValueError(f"{kind.value} cannot take all micro-batches of a stage as one: gpipe can")
    if kind is ScheduleKind.INTERLEAVED:
        return interleaved(placement, microbatches)
    if kind is ScheduleKind.ZB_H1:
        return zb_h1(placement, microbatches)
    if kind is ScheduleKind.ZBV:
        return zbv(placement, microbatches)
    return one_f_one_b(placement, microbatches)
