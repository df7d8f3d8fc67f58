"""What other settings would save of a plan's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    def to_fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> WhatIf:
        """What `to_fields` gave.

        Raises:
            KeyError, TypeError: when it is something else.
        """
        return cls(
            tuple(
                Remedy(**remedy | {"device_bytes": tuple(remedy["device_bytes"])})
                for remedy in fields["remedies"]
            )
        )
