"""The storages of a device: how many hold each, and what one action allocates and frees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.passes.allocation_trace import (
    AllocationTrace,
    BlockKind,
    StageTraces,
    StorageEvent,
)
from gpipe_compiler.plan.memory_curve import CATEGORIES, NOTHING, Category, Sizes


@dataclass(slots=True)
class SharedBuffer:
    """A storage with a reference count.

    Attributes:
        name: for people: the value that lies in it.
        stage: that made it; -1 for what came from elsewhere.
    """

    bytes: int
    category: Category
    name: str
    stage: int
    number: int
    holders: int = 1


@dataclass(frozen=True, slots=True)
class Own:
    """A storage of one stage alone: a block of its traces, of one micro-batch."""

    stage: int
    block: int


PLACE = {category: place for place, category in enumerate(CATEGORIES)}
"""Where each category stands among them."""

Listener = Callable[[int, int, SharedBuffer | Own], None]
"""Called with the number of a storage, its bytes when it is allocated or -1 when it is freed, and
the storage."""


class RefCounts:
    """The reference-counted storages of a device, and the bytes of all."""

    def __init__(self, stages: Iterable[int], listener: Listener | None = None) -> None:
        self.now: list[int] = list(NOTHING)
        self.total = 0
        self.of_stage = dict.fromkeys(stages, 0)
        self.listener = listener
        self._count = 0

    @property
    def sizes(self) -> Sizes:
        return tuple(self.now)

    def number(self) -> int:
        """A number that no storage has had."""
        self._count += 1
        return self._count

    def take(
        self, size: int, category: Category, name: str, stage: int = -1, *, counted: bool = True
    ) -> SharedBuffer:
        """Allocates a storage with one holder.

        Args:
            counted: False where its bytes have been added already.
        """
        held = SharedBuffer(size, category, name, stage, self.number())
        if counted:
            self._add(held, size)
        return held

    def release(self, held: SharedBuffer | None) -> None:
        """Drops one holder; the last one frees the storage."""
        if held is None:
            return
        held.holders -= 1
        if held.holders == 0:
            self._add(held, -held.bytes)

    def end_in(self, stage: int, held: SharedBuffer | None) -> None:
        """Drops the last holder within an action of a stage, whose delta has the bytes.

        They were not the stage's own where another has made them.
        """
        if held is None:
            return
        held.holders -= 1
        if held.stage != stage:
            self.of_stage[stage] += held.bytes
            if held.stage in self.of_stage:
                self.of_stage[held.stage] -= held.bytes

    def add(self, changes: Iterable[tuple[int, int]], stage: int) -> None:
        """Adds the delta of an action of a stage.

        Args:
            changes: numbers of categories, and by how many bytes each.
        """
        change = 0
        for index, size in changes:
            self.now[index] += size
            change += size
        self.total += change
        self.of_stage[stage] += change

    def _add(self, held: SharedBuffer, change: int) -> None:
        self.now[PLACE[held.category]] += change
        self.total += change
        if held.stage in self.of_stage:
            self.of_stage[held.stage] += change
        if self.listener is not None:
            self.listener(held.number, change if change >= 0 else -1, held)


def gradient_of(value: str) -> str:
    return f"gradient of {value}"


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActionDelta:
    """What one action of a stage allocates and frees, relative to its beginning.

    Attributes:
        peak: bytes more than at the beginning, at most; 0 where it never takes more.
        at_peak: the same by category.
        net: bytes more when it has ended: the places of categories, and how many of each.
        shared: those of `moves` that are of shared blocks.
    """

    moves: tuple[StorageEvent, ...]
    peak: int
    at_peak: Sizes
    net: tuple[tuple[int, int], ...]
    shared: tuple[StorageEvent, ...]


class ActionDeltas:
    """The deltas of one stage.

    Blocks are the stage's own, or shared with others: received, handed on, and their gradients.
    A shared block with other holders stays allocated when the stage releases it.
    """

    def __init__(self, traces: StageTraces) -> None:
        self.traces = traces
        self._made: dict[tuple[int, tuple[int, ...], frozenset[BlockKind]], ActionDelta] = {}

    @cached_property
    def shared(self) -> frozenset[int]:
        """The blocks that others may hold."""
        traces = self.traces
        tables = (traces.received, traces.returned, traces.arriving, traces.sent_back)
        return frozenset(block for table in tables for block in table.values())

    @cached_property
    def handed_on(self) -> frozenset[int]:
        return frozenset(self.traces.returned.values())

    @cached_property
    def handed_back(self) -> frozenset[int]:
        return frozenset(self.traces.sent_back.values())

    @cached_property
    def category(self) -> Mapping[int, Category]:
        return {number: self._category(number) for number in self.traces.blocks}

    @cached_property
    def names(self) -> Mapping[int, str]:
        """What lies in the shared blocks: a value, or the gradient of one."""
        traces = self.traces
        found = {block: name for name, block in traces.sent_back.items()}
        found.update({block: name for name, block in traces.arriving.items()})
        found = {block: f"gradient of {name}" for block, name in found.items()}
        for table in (traces.received, traces.returned):
            found.update({block: name for name, block in table.items()})
        return found

    def of(
        self, trace: AllocationTrace, held: tuple[int, ...], without: frozenset[BlockKind]
    ) -> ActionDelta:
        """The delta of a trace.

        Args:
            held: the shared blocks with other holders, in the order of `ended`.
            without: kinds of blocks that there are none of, or that are there already.
        """
        key = id(trace), held, without
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._delta(self._moves(trace, held, without))
        return found

    def ended(self, trace: AllocationTrace) -> tuple[int, ...]:
        """The shared blocks that a stage releases in a trace."""
        return self._ends[id(trace)]

    @cached_property
    def _ends(self) -> Mapping[int, tuple[int, ...]]:
        return {
            id(trace): tuple(self.shared.intersection(e.block for e in trace if not e.alive))
            for trace in self._traces
        }

    @property
    def _traces(self) -> Sequence[AllocationTrace]:
        traces = self.traces
        found = (
            traces.forward,
            traces.forward_again,
            traces.first_backward,
            traces.backward,
            traces.first_weight,
            traces.weight,
        )
        return [trace for trace in found if trace is not None]

    def _category(self, number: int) -> Category:
        traces = self.traces
        match traces.blocks[number].kind:
            case BlockKind.PARAMETER_GRADIENT:
                return Category.GRADIENTS
            case BlockKind.CAST:
                return Category.WEIGHTS
            case BlockKind.BUFFER:
                return Category.ACTIVATIONS
            case BlockKind.RECEIVED:
                return Category.BOUNDARY
        if number in traces.kept:
            return Category.ACTIVATIONS
        return Category.BOUNDARY if number in self.shared else Category.TEMPORARIES

    def _moves(
        self, trace: AllocationTrace, held: Collection[int], without: Collection[BlockKind]
    ) -> list[StorageEvent]:
        blocks = self.traces.blocks
        return [
            event
            for event in trace
            if blocks[event.block].kind not in without and (event.alive or event.block not in held)
        ]

    def _delta(self, moves: Sequence[StorageEvent]) -> ActionDelta:
        blocks, category = self.traces.blocks, self.category
        now = list(NOTHING)
        total = peak = 0
        at_peak = NOTHING
        for move in moves:
            size = blocks[move.block].bytes if move.alive else -blocks[move.block].bytes
            now[PLACE[category[move.block]]] += size
            total += size
            if total > peak:
                peak, at_peak = total, tuple(now)
        shared = tuple(move for move in moves if move.block in self.shared)
        net = tuple((index, size) for index, size in enumerate(now) if size)
        return ActionDelta(tuple(moves), peak, at_peak, net, shared)
