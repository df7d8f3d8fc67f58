"""What a stage allocates and frees, action by action: the types.

A trace is made by running a stage on fake tensors (`passes.memory_trace`). A block is a storage:
several tensors that are views of it count once. Numbers of blocks are those of one micro-batch:
what a forward keeps for the backward has the same number in both traces.

Ops are positions in the stage, so that stages of equal structure share their traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeAlias

NO_OP = -1
"""The position of what no op of the stage is at work for."""


class BlockKind(Enum):
    """What a block is for."""

    RECEIVED = "received"
    """A value that the stage takes, or the gradient of one that it hands on: made elsewhere."""
    ACTIVATION = "activation"
    """Made by an op of the forward, or by one that runs again in the backward."""
    GRADIENT = "gradient"
    """Made in the backward."""
    PARAMETER_GRADIENT = "parameter gradient"
    """Becomes the gradient of a parameter: stays until the optimizer has used it."""
    BUFFER = "buffer"
    """Stands in for a buffer that the forward writes to, where another micro-batch comes before
    the backward (`core.recompute.WrittenBuffers`). Where none does, there is no such block: the
    buffer itself is used. A stage that recomputes makes it in its first forward, and uses it up in
    the second."""
    CAST = "cast"
    """A parameter cast by autocast, in the first forward of a run: all micro-batches share it, and
    it stays to the end of the run. The other kinds are of one micro-batch."""


@dataclass(frozen=True, slots=True)
class StorageLife:
    """A storage.

    Attributes:
        bytes: of the storage, not rounded.
        op: the position of the op that made it, or in whose backward it was made; `NO_OP` for what
            no op made.
        shape, dtype: of the first tensor in it, in words such as `8x64x56x56` and `float32`.
    """

    bytes: int
    kind: BlockKind
    op: int
    shape: str
    dtype: str


@dataclass(frozen=True, slots=True)
class StorageEvent:
    """A block is allocated (`alive`) or freed while the op at position `op` runs.

    In a backward that is the op whose part of it runs.
    """

    block: int
    alive: bool
    op: int


AllocationTrace: TypeAlias = tuple[StorageEvent, ...]
"""What a stage itself allocates and frees in one action, in order. Blocks with other holders (what
was received, what is sent on) are freed by the last of them."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the sparse gradients of a stage's parameters grow: traces tell the first micro-batch's.

    A sum of sparse gradients has the rows of all of them, and is made beside what it is made of.

    Attributes:
        first: bytes that they have by the traces, after any micro-batch. What looks into the batch
            is none.
        each: bytes of the rows of one micro-batch; of those of `n`, where there are two or more, a
            sum has `n` times as many.
    """

    first: int
    each: int


@dataclass(frozen=True)
class StageTraces:
    """The traces of one stage for one micro-batch.

    A value or gradient that looks into the model's own state has no block: it takes no memory of
    its own. A block may stand for several names.

    Attributes:
        ops: names of the ops, in the order in which they run.
        blocks: by number. The same object for stages of equal structure, as are the traces.
        received: block of each input of the stage, by the value's name.
        returned: block of each output (and of the loss), by the value's name.
        arriving: block of the gradient that comes for each output that has one.
        sent_back: block of the gradient of each input that has one.
        forward: with everything kept that the backward needs. In inference: with nothing kept.
        kept: the blocks that autograd, and who asks it for gradients, hold after the forward.
        first_backward: that of the first micro-batch of a step, whose parameter gradients stay.
        backward: that of a later one, whose parameter gradients are added to those.
        first_weight, weight: where the backward is split, the second part of each; the two before
            are the first part then. None where it is not.
        growth: of sparse gradients; None where all are dense.
    """

    ops: tuple[str, ...]
    blocks: Mapping[int, StorageLife]
    received: Mapping[str, int]
    returned: Mapping[str, int]
    arriving: Mapping[str, int]
    sent_back: Mapping[str, int]
    forward: AllocationTrace
    kept: frozenset[int]
    first_backward: AllocationTrace
    backward: AllocationTrace
    first_weight: AllocationTrace | None = None
    weight: AllocationTrace | None = None
    growth: Growth | None = None

    @cached_property
    def forward_again(self) -> AllocationTrace:
        """A forward of which nothing is kept (the first one, where it is recomputed).

        It runs with gradients on: what autograd keeps is freed when it ends.
        """
        ended = (
            StorageEvent(number, False, NO_OP)
            for number in sorted(self.kept)
            if self.blocks[number].kind is BlockKind.ACTIVATION
        )
        return (*self.forward, *ended)

    def op(self, position: int) -> str:
        """The name of the op at a position; empty for `NO_OP`."""
        return "" if position == NO_OP else self.ops[position]
