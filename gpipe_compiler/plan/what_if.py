"""What a plan tells of its memory for people to act on: arenas, and what each remedy would save."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Arena:
    """The activations of one micro-batch of a stage, its forward and its backward, in one arena.

    With all that ops make on the way, and without gradients of parameters (`passes.offsets`).

    Attributes:
        no_reuse: bytes where every block has a place of its own.
        planned: where they are placed by their live ranges, greedy by size.
        lower_bound: the most that is needed at a time: no arena is smaller.
    """

    stage: int
    no_reuse: int
    planned: int
    lower_bound: int


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
    """What could be done about the memory of a plan.

    Attributes:
        arenas: of the stages that have few enough blocks to be placed.
    """

    arenas: tuple[Arena, ...]
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
            arenas=tuple(Arena(**arena) for arena in fields["arenas"]),
            remedies=tuple(
                Remedy(**remedy | {"device_bytes": tuple(remedy["device_bytes"])})
                for remedy in fields["remedies"]
            ),
        )
