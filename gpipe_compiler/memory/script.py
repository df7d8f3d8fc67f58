"""A tape made ready to be played over and over: its changes added up once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.memory.ref_counts import PLACE
from gpipe_compiler.passes.allocation_trace import AllocationTrace, BlockKind, StageTapes
from gpipe_compiler.plan.memory_curve import NOTHING, Category, Sizes


@dataclass(frozen=True)
class Move:
    """A block comes to life (`alive`) or ends."""

    block: int
    alive: bool


@dataclass(frozen=True)
class Script:
    """What one action of a stage takes and gives back, from its beginning on.

    Attributes:
        moves: in order.
        peak: bytes more than at the beginning, at most; 0 where it never takes more.
        at_peak: the same by category.
        net: bytes more when it has ended: the places of categories, and how many of each.
        place: how many of `moves` lie before the peak.
        shared: those of `moves` that are of shared blocks.
    """

    moves: tuple[Move, ...]
    peak: int
    at_peak: Sizes
    net: tuple[tuple[int, int], ...]
    place: int
    shared: tuple[Move, ...]


class Scripts:
    """The scripts of one stage.

    Blocks are the stage's own, or shared with others: received, handed on, and their gradients.
    A shared block that somebody else holds does not end when the stage lets go of it.
    """

    def __init__(self, tapes: StageTapes) -> None:
        self.tapes = tapes
        self._made: dict[tuple[int, tuple[int, ...], frozenset[BlockKind]], Script] = {}

    @cached_property
    def shared(self) -> frozenset[int]:
        """The blocks that others may hold."""
        tapes = self.tapes
        tables = (tapes.received, tapes.returned, tapes.arriving, tapes.sent_back)
        return frozenset(block for table in tables for block in table.values())

    @cached_property
    def handed_on(self) -> frozenset[int]:
        """The blocks that a forward makes for others."""
        return frozenset(self.tapes.returned.values())

    @cached_property
    def handed_back(self) -> frozenset[int]:
        """The blocks that a backward makes for others."""
        return frozenset(self.tapes.sent_back.values())

    @cached_property
    def category(self) -> Mapping[int, Category]:
        """What each block is for."""
        return {number: self._category(number) for number in self.tapes.blocks}

    @cached_property
    def names(self) -> Mapping[int, str]:
        """What lies in the shared blocks: a value, or the gradient of one."""
        tapes = self.tapes
        found = {block: name for name, block in tapes.sent_back.items()}
        found.update({block: name for name, block in tapes.arriving.items()})
        found = {block: f"gradient of {name}" for block, name in found.items()}
        for table in (tapes.received, tapes.returned):
            found.update({block: name for name, block in table.items()})
        return found

    def of(
        self, tape: AllocationTrace, held: tuple[int, ...], without: frozenset[BlockKind]
    ) -> Script:
        """The script of a tape.

        Args:
            held: the shared blocks that somebody else holds, in the order of `ended`.
            without: kinds of blocks that there are none of, or that are there already.
        """
        key = id(tape), held, without
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._script(self._moves(tape, held, without))
        return found

    def ended(self, tape: AllocationTrace) -> tuple[int, ...]:
        """The shared blocks that a stage lets go of in a tape."""
        return self._ends[id(tape)]

    @cached_property
    def _ends(self) -> Mapping[int, tuple[int, ...]]:
        return {
            id(tape): tuple(self.shared.intersection(e.block for e in tape.events if not e.alive))
            for tape in self._tapes
        }

    @property
    def _tapes(self) -> Sequence[AllocationTrace]:
        tapes = self.tapes
        found = (
            tapes.forward,
            tapes.forward_again,
            tapes.first_backward,
            tapes.backward,
            tapes.first_weight,
            tapes.weight,
        )
        return [tape for tape in found if tape is not None]

    def _category(self, number: int) -> Category:
        tapes = self.tapes
        match tapes.blocks[number].kind:
            case BlockKind.PARAMETER_GRADIENT:
                return Category.GRADIENTS
            case BlockKind.CAST:
                return Category.WEIGHTS
            case BlockKind.BUFFER:
                return Category.ACTIVATIONS
            case BlockKind.RECEIVED:
                return Category.BOUNDARY
        if number in tapes.kept:
            return Category.ACTIVATIONS
        return Category.BOUNDARY if number in self.shared else Category.TEMPORARIES

    def _moves(
        self, tape: AllocationTrace, held: Collection[int], without: Collection[BlockKind]
    ) -> list[Move]:
        blocks = self.tapes.blocks
        return [
            Move(event.block, event.alive)
            for event in tape.events
            if blocks[event.block].kind not in without and (event.alive or event.block not in held)
        ]

    def _script(self, moves: Sequence[Move]) -> Script:
        blocks, category = self.tapes.blocks, self.category
        now = list(NOTHING)
        total = peak = place = 0
        at_peak = NOTHING
        for number, move in enumerate(moves):
            size = blocks[move.block].bytes if move.alive else -blocks[move.block].bytes
            now[PLACE[category[move.block]]] += size
            total += size
            if total > peak:
                peak, at_peak, place = total, tuple(now), number + 1
        shared = tuple(move for move in moves if move.block in self.shared)
        net = tuple((index, size) for index, size in enumerate(now) if size)
        return Script(tuple(moves), peak, at_peak, net, place, shared)
