"""What the optimizer holds, and what it takes for a moment while it steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_compiler.options.optimizer_state import (
    AnyOptimizer,
    OwnOptimizer,
    copies_of,
    remembered_bytes,
)

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


def update_bytes(
    optimizer: AnyOptimizer, parameters: Mapping[str, int], *, on_host: bool
) -> UpdateBytes:
    """What an optimizer takes for parameters of so many bytes each, by name.

    Adam's step makes the root of its second moments and divides it: on the host parameter by
    parameter (torch.optim.adam._single_tensor_adam), where both are there for a moment; on a GPU
    for all parameters at once and in place (_multi_tensor_adam, which is the default there).
    SGD, with momentum or without, writes in place. One of the user's own that remembers as much as
    Adam is taken to need as much besides.
    """
    remembered = sum(remembered_bytes(optimizer, *pair) for pair in parameters.items())
    if copies_of(optimizer) < 2:
        return UpdateBytes(remembered, 0)
    if not on_host:
        return UpdateBytes(remembered, sum(parameters.values()))
    steps = 0 if isinstance(optimizer, OwnOptimizer) else _STEP_BYTES * len(parameters)
    return UpdateBytes(remembered + steps, 2 * max(parameters.values(), default=0))
