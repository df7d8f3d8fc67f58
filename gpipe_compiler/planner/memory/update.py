"""The memory of an optimizer, and of gradients on their way to other replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from gpipe_compiler.options import AnyOptimizer, OwnOptimizer, copies_of, remembered_bytes
from gpipe_compiler.passes.footprint import part_of
from gpipe_compiler.runtime.core.reducer import BUCKET_BYTES

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
    """The memory of an optimizer for parameters with these bytes, by name.

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


def pieces_of(optimizer: AnyOptimizer, parameters: Mapping[str, int]) -> Iterator[int]:
    """What an optimizer remembers of each parameter, in tensors no larger than that."""
    for name, size in parameters.items():
        left = remembered_bytes(optimizer, name, size)
        while left > 0 and size:
            yield min(left, size)
            left -= size


def row_bytes(sizes: Collection[int], parts: int) -> int:
    """Bytes in which the gradients of a stage go to other replicas.

    Where these divide them, each gets its rows, and gradients go as their rows are made.

    Args:
        sizes: bytes of the gradients.
        parts: the replicas that divide them; 1 for none.
    """
    if parts == 1:
        return sum(sizes)
    bucket = min(sum(sizes), BUCKET_BYTES + max(sizes, default=0))
    return part_of(sum(sizes), parts) + bucket
