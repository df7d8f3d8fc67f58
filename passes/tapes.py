"""What a stage takes of memory and gives back, action by action: the vocabulary.

A tape is made by running a stage on fake tensors (`rehearsal.py`). Blocks are storages: what
several tensors look into counts once. Their numbers are those of one micro-batch through a stage:
the block that a forward leaves to the backward has the same number in both tapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class BlockKind(Enum):
    """What a block is for."""

    RECEIVED = "received"
    """A value that the stage takes, or the gradient of one that it hands on: made elsewhere."""
    ACTIVATION = "activation"
    """Made by an op of the forward."""
    GRADIENT = "gradient"
    """Made in the backward."""
    PARAMETER_GRADIENT = "parameter gradient"
    """Becomes the gradient of a parameter: stays until the optimizer has used it."""


@dataclass(frozen=True, slots=True)
class Block:
    """A storage.

    Attributes:
        bytes: of the storage, not rounded.
        op: the op of the graph that made it, or in whose backward it was made; "" if none is known.
        shape, dtype: of the first tensor in it, in words such as `8x64x56x56` and `float32`.
    """

    bytes: int
    kind: BlockKind
    op: str
    shape: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Event:
    """A block comes to life (`alive`) or ends, while an op is at work."""

    block: int
    alive: bool
    op: str


@dataclass(frozen=True, slots=True)
class Tape:
    """What one action takes and gives back, in order.

    Attributes:
        events: of blocks that the stage's own computation makes or lets go. Blocks that somebody
            else holds too (what was received, what is handed on) end when the last of them lets go.
    """

    events: tuple[Event, ...]


@dataclass(frozen=True)
class StageTapes:
    """The tapes of one stage for one micro-batch.

    Attributes:
        blocks: by number.
        received: block of each input of the stage, by the value's name.
        returned: block of each output (and of the loss), by the value's name.
        arriving: block of the gradient that comes for each output that has one.
        sent_back: block of the gradient of each input that has one.
        forward: with everything kept that the backward needs.
        kept: the blocks that autograd holds after the forward.
        forward_again: a forward of which nothing is kept (the first one, where it is recomputed).
        first_backward: that of the first micro-batch of a step, whose parameter gradients stay.
        backward: that of a later one, whose parameter gradients are added to those.
    """

    blocks: Mapping[int, Block]
    received: Mapping[str, int]
    returned: Mapping[str, int]
    arriving: Mapping[str, int]
    sent_back: Mapping[str, int]
    forward: Tape
    kept: frozenset[int]
    forward_again: Tape
    first_backward: Tape
    backward: Tape
