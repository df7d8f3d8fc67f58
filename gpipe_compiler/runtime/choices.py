"""What the caller of a pipeline may choose, from the words he uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum

import torch

from .distributed import launched
from .errors import UsageError
from .spec import ScheduleKind


class TransportKind(Enum):
    """How values get from stage to stage."""

    LOCAL = "local"
    DISTRIBUTED = "distributed"


def schedule_kind(schedule: ScheduleKind | str) -> ScheduleKind:
    """The schedule of this name.

    Raises:
        UsageError: when there is none.
    """
    try:
        return ScheduleKind(schedule)
    except ValueError as error:
        known = ", ".join(kind.value for kind in ScheduleKind)
        raise UsageError(f"there is no schedule {schedule!r}; there are {known}") from error


def transport_kind(transport: TransportKind | str | None) -> TransportKind:
    """The transport of this name; unless given, what the process was started for.

    Raises:
        UsageError: when there is none.
    """
    if transport is None:
        return TransportKind.DISTRIBUTED if launched() else TransportKind.LOCAL
    try:
        return TransportKind(transport)
    except ValueError as error:
        known = ", ".join(kind.value for kind in TransportKind)
        raise UsageError(f"there is no transport {transport!r}; there are {known}") from error


def listed_devices(
    devices: Sequence[torch.device | str] | torch.device | str | None,
) -> tuple[torch.device, ...]:
    """The devices that were named, none for None.

    Raises:
        UsageError: when torch knows no such device.
    """
    if devices is None:
        return ()
    listed = [devices] if isinstance(devices, torch.device | str) else devices
    try:
        return tuple(torch.device(device) for device in listed)
    except RuntimeError as error:
        raise UsageError(str(error).splitlines()[0]) from error


def own_device(given: Sequence[torch.device]) -> torch.device | None:
    """This rank's device among those given for all ranks."""
    if len(given) > 1:
        return given[int(os.environ.get("RANK", "0"))]
    return given[0] if given else None
