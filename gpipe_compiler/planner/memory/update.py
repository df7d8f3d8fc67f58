"""The memory of an optimizer, and of gradients on their way to other replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from gpipe_compiler.options import (
    AnyOptimizer,
    Division,
    OwnOptimizer,
    copies_of,
    remembered_bytes,
)
from gpipe_compiler.passes.allocation_trace import BlockKind
from gpipe_compiler.passes.memory_trace import StageTraces
from gpipe_compiler.runtime.core.reducer import BUCKET_BYTES
from gpipe_compiler.runtime.core.shards import blocks_of

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


def row_bytes(sizes: Collection[int], division: Division) -> int:
    """Bytes in which the gradients of a stage go to other replicas, from its last backward on.

    Where these divide them, each gets its rows, and gradients go as their rows are made.

    Args:
        sizes: bytes of the gradients.
    """
    if division.parts == 1:
        return sum(sizes)
    if division.always:
        return 0  # they go block by block
    bucket = min(sum(sizes), BUCKET_BYTES + max(sizes, default=0))
    return division.part_of(sum(sizes)) + bucket


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of what is gathered block by block.

    Attributes:
        names: of all that is.
        gathered: of each weight of the largest block.
        rows: of gradients of such a block, and of those on their way.
    """

    names: frozenset[str] = frozenset()
    gathered: tuple[int, ...] = ()
    rows: int = 0


def block_bytes(sizes: Mapping[str, int], division: Division) -> BlockBytes:
    """Those of the weights with these bytes by name.

    While the gradients of a block are made, those of the one before it are on their way: in a row
    that is sent, and one that is received.
    """
    blocks: dict[str, list[int]] = {}
    for name, block in blocks_of(list(sizes)).items():
        blocks.setdefault(block, []).append(sizes[name])
    largest = max(blocks.values(), key=sum, default=[])
    whole = sum(largest)
    rows = 3 * whole + 2 * division.part_of(whole)
    return BlockBytes(frozenset(sizes), tuple(largest), rows)


def with_divided_gradients(traces: StageTraces, division: Division) -> StageTraces:
    """The traces of a stage, of whose gradients each replica keeps its part."""
    blocks = {
        number: replace(block, bytes=division.part_of(block.bytes))
        if block.kind is BlockKind.PARAMETER_GRADIENT
        else block
        for number, block in traces.blocks.items()
    }
    return replace(traces, blocks=blocks)
