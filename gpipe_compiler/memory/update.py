"""What the optimizer holds, and what it takes for a moment while it steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_compiler.runtime.spec import OptimizerKind

_COPIES = {
    OptimizerKind.SGD: 0,
    OptimizerKind.MOMENTUM: 1,
    OptimizerKind.ADAM: 2,
    OptimizerKind.ADAMW: 2,
}
"""How many numbers each optimizer remembers of every parameter."""

_STEP_BYTES = 4
"""Of the count of steps that Adam keeps for every parameter, a tensor of its own on the host."""


@dataclass(frozen=True, slots=True)
class UpdateBytes:
    """Bytes of an optimizer on one device.

    Attributes:
        remembered: from step to step.
        temporary: besides, at most, while it steps.
    """

    remembered: int
    temporary: int


def copies_of(optimizer: OptimizerKind) -> int:
    """How many numbers an optimizer remembers of every parameter."""
    return _COPIES[optimizer]


def update_bytes(
    optimizer: OptimizerKind, parameters: Sequence[int], *, on_host: bool
) -> UpdateBytes:
    """What an optimizer takes for parameters of so many bytes each.

    Adam's step makes the root of its second moments and divides it: on the host parameter by
    parameter (torch.optim.adam._single_tensor_adam), where both are there for a moment; on a GPU
    for all parameters at once and in place (_multi_tensor_adam, which is the default there).
    SGD, with momentum or without, writes in place.
    """
    whole = sum(parameters)
    remembered = copies_of(optimizer) * whole
    if copies_of(optimizer) < 2:
        return UpdateBytes(remembered, 0)
    if not on_host:
        return UpdateBytes(remembered, whole)
    return UpdateBytes(remembered + _STEP_BYTES * len(parameters), 2 * max(parameters, default=0))
