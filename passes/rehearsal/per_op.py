"""What each op of a rehearsed stage takes by itself, read off the tapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpipe_compiler.passes.tapes import NO_OP, Block, BlockKind, Event, StageTapes


@dataclass(frozen=True, slots=True)
class OpMemory:
    """Bytes of one op for one micro-batch.

    Attributes:
        made: of what its forward makes, all storages together.
        kept: of these, what is held until the backward, whichever op asks for it there.
        forward_peak: how far above what was held before it its forward goes, results included.
        forward_net: what is held more after it than before; less than nothing where it lets go.
        backward_peak, backward_net: the same of its part of the first backward, in which the
            gradients of its parameters are new.
    """

    made: int = 0
    kept: int = 0
    forward_peak: int = 0
    forward_net: int = 0
    backward_peak: int = 0
    backward_net: int = 0


def per_op(tapes: StageTapes) -> tuple[OpMemory, ...]:
    """A row for every op, in order.

    Where the backwards of two ops take turns, each goes by its own turns: the peak is that of the
    highest of them, the net that of all.
    """
    made = [0] * len(tapes.ops)
    kept = [0] * len(tapes.ops)
    for event in tapes.forward.events:
        block = tapes.blocks[event.block]
        if event.alive and block.kind is BlockKind.ACTIVATION:
            made[block.op] += block.bytes
            kept[block.op] += block.bytes if event.block in tapes.kept else 0
    forward = _Turns(tapes, tapes.forward.events)
    weight = () if tapes.first_weight is None else tapes.first_weight.events
    backward = _Turns(tapes, (*tapes.first_backward.events, *weight))
    return tuple(
        OpMemory(
            made[position],
            kept[position],
            forward.peak[position],
            forward.net[position],
            backward.peak[position],
            backward.net[position],
        )
        for position in range(len(tapes.ops))
    )


class _Turns:
    """The peak and the net of every op, over the events of an action."""

    def __init__(self, tapes: StageTapes, events: Sequence[Event]) -> None:
        self.peak = [0] * len(tapes.ops)
        self.net = [0] * len(tapes.ops)
        for position, turn in groupby(events, key=lambda event: event.op):
            if position == NO_OP:
                continue
            now = 0
            for change in _changes(tapes, turn):
                now += change
                self.peak[position] = max(self.peak[position], now)
            self.net[position] += now


def _changes(tapes: StageTapes, events: Iterator[Event]) -> Iterator[int]:
    for event in events:
        block: Block = tapes.blocks[event.block]
        if block.kind is not BlockKind.CAST:
            yield block.bytes if event.alive else -block.bytes
