"""What other settings would save of a plan's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another setting for the same stages on the same devices.

    Attributes:
        change: as on the command line: `--microbatches 16`.
        device_bytes: for every device, its peak, played exactly.
        step_s: simulated seconds of one mini-batch.
    """

    change: str
    device_bytes: tuple[int, ...]
    step_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What could be done about the memory of a plan."""

    remedies: tuple[Remedy, ...]
