"""The order of a device's work, forward only: `0F0` is stage 0 on micro-batch 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from .errors import PipelineError
from .spec import PipelineSpec

Action: TypeAlias = tuple[int, int]
"""Stage and micro-batch."""

_ACTION = re.compile(r"(\d+)F(\d+)")


def orders_for(spec: PipelineSpec, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Each device's actions: as planned, or for another number of micro-batches in the same way.

    Every device takes the micro-batches one after another, each through all of its stages. Nobody
    waits for what comes later, so no schedule of this kind can hang.

    Raises:
        PipelineError: when the planned orders cannot be read.
    """
    if microbatches == spec.microbatches and spec.orders:
        return tuple(map(_parse, spec.orders))
    devices = range(len(spec.devices))
    return tuple(_in_turn(spec.placement, device, microbatches) for device in devices)


def _in_turn(placement: Sequence[int], device: int, microbatches: int) -> tuple[Action, ...]:
    mine = [stage for stage, place in enumerate(placement) if place == device]
    return tuple((stage, number) for number in range(microbatches) for stage in mine)


def _parse(order: str) -> tuple[Action, ...]:
    actions = []
    for word in order.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise PipelineError(f"schedule.py: {word!r} is no forward of a stage")
        actions.append((int(match[1]), int(match[2])))
    return tuple(actions)
