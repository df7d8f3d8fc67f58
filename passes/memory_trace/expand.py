"""Expands the traces of a shortened part to those of the whole.

A trace goes through the blocks one after another, forwards or backwards, maybe more than once. Each
time, what happens in the second block has to be what happens in the third, one further; what is
left out happens between the two, once for each block left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gpipe_compiler.ir.stretches import FIRST, KEPT, ShortStretch
from gpipe_compiler.passes.allocation_trace import (
    NO_OP,
    AllocationTrace,
    StageTraces,
    StorageEvent,
    StorageLife,
)

_FEW = 2
"""Storages that no op made, at most: of more, one might belong to every block."""

_RECEIVED, _FORWARD, _ARRIVING, _BACKWARD = range(4)
"""Phases: of what is received, of the forward, of what arrives, of the first of the others."""

_MIDDLE = (FIRST - 1, FIRST)
"""The two blocks between which others are left out."""

_OUTSIDE = -1
"""In place of the number of a block, for what is outside of all."""


class Label(NamedTuple):
    """What a storage is, whatever the number of blocks.

    Attributes:
        block: that of the op which made it; `_OUTSIDE` where that is outside of all.
        op: the position of that op in its block, or in the shortened part.
        phase: the action in which it came, by number.
        place: how many came before it there for the same op.
    """

    block: int
    op: int
    phase: int
    place: int


class _Sight(NamedTuple):
    """An event, by labels; block and op as there."""

    block: int
    op: int
    alive: bool
    label: Label


_Visit: TypeAlias = tuple[int, list[_Sight]]
"""What happens in a row in one block, or outside of all."""


def expanded(traces: StageTraces, short: ShortStretch, ops: Sequence[str]) -> StageTraces | None:
    """The traces of the whole part.

    Returns:
        None where the blocks in the middle are not seen to be alike.
    """
    known = _Short.of(traces, short)
    if traces.growth is not None or not known.is_regular():
        return None
    longer = [known.longer(trace) for trace in _actions(traces)]
    actions = [sights for sights in longer if sights is not None]
    return known.whole(actions, ops) if len(actions) == len(longer) else None


def _actions(traces: StageTraces) -> Iterator[AllocationTrace]:
    """The traces in the order in which they are made, those that there are not empty."""
    order = (traces.first_backward, traces.first_weight, traces.backward, traces.weight)
    yield traces.forward
    yield from (trace or () for trace in order)


@dataclass(frozen=True)
class _Short:
    """The traces of a shortened part.

    Attributes:
        labels: of all storages, by number.
        numbers: the other way round.
    """

    traces: StageTraces
    short: ShortStretch
    labels: Mapping[int, Label]
    numbers: Mapping[Label, int]

    @classmethod
    def of(cls, traces: StageTraces, short: ShortStretch) -> _Short:
        counts: Counter[tuple[int, int]] = Counter()
        labels: dict[int, Label] = {}

        def label(number: int, op: int, phase: int) -> None:
            if number not in labels:
                labels[number] = Label(*_placed(short, op), phase, counts[op, phase])
                counts[op, phase] += 1

        for number in traces.received.values():
            label(number, NO_OP, _RECEIVED)
        for number in traces.arriving.values():
            label(number, NO_OP, _ARRIVING)
        for phase, trace in zip(
            (_FORWARD, *range(_BACKWARD, _BACKWARD + 4)), _actions(traces), strict=True
        ):
            for event in trace:
                if event.alive:
                    label(event.block, event.op, phase)
        return cls(traces, short, labels, {label: number for number, label in labels.items()})

    def is_regular(self) -> bool:
        """Whether storages of the second block are like those of the third, and none is of all."""
        traces = self.traces
        rows: dict[int, set[object]] = {block: set() for block in _MIDDLE}
        for number, label in self.labels.items():
            if label.block in rows:
                found = dataclasses.replace(traces.blocks[number], op=label.op)
                rows[label.block].add((label[1:], found, number in traces.kept))
        handed = (*traces.returned.values(), *traces.sent_back.values())
        of_none = Counter(
            label.phase
            for label in self.labels.values()
            if label.op == NO_OP and label.phase not in (_RECEIVED, _ARRIVING)
        )
        one, other = rows.values()
        # A loss has a gradient of its own, which is made in two steps.
        return (
            one == other
            and all(count <= _FEW for count in of_none.values())
            and not any(self.labels[number].block in _MIDDLE for number in handed)
        )

    def longer(self, trace: AllocationTrace) -> list[_Sight] | None:
        """The events of the whole part; None where what is left out is not known."""
        visits = list(self._visits(trace))
        if not all(_is_near(sight, block) for block, sights in visits for sight in sights):
            return None
        removed = len(self.short.left_out)
        found: list[_Sight] = []
        between: Iterable[int] | None = None
        for index, (block, sights) in enumerate(visits):
            if block in _MIDDLE:
                if between is None:
                    if not _are_alike(visits[index : index + 2]):
                        return None
                    further = range(1, removed + 1)
                    between = further if block < FIRST else reversed(further)
                else:
                    second = sights if block < FIRST else visits[index - 1][1]
                    for by in between:
                        found.extend(self._moved(second, by))
                    between = None
            found.extend(self._moved(sights, removed if block >= FIRST else 0))
        return found

    def _visits(self, trace: AllocationTrace) -> Iterator[_Visit]:
        """The events of a trace, block by block; what ends together in the order of its blocks."""
        sights: list[_Sight] = []
        for (op, alive), group in itertools.groupby(trace, lambda e: (e.op, e.alive)):
            labels = [self.labels[event.block] for event in group]
            place = _placed(self.short, op)
            sights.extend(
                _Sight(*place, alive, label) for label in (labels if alive else sorted(labels))
            )
        for block, visit in itertools.groupby(
            sights, lambda sight: sight.label.block if sight.block == _OUTSIDE else sight.block
        ):
            yield block, list(visit)

    def _moved(self, sights: Iterable[_Sight], by: int) -> Iterator[_Sight]:
        """The same, some blocks further in the whole part."""
        for sight in sights:
            # What the first and the last have in common they have whatever is between them.
            common = sight.block != _OUTSIDE and abs(sight.block - sight.label.block) == KEPT - 1
            moved = _further(sight, by)
            yield moved._replace(label=self._in_full(sight.label)) if common else moved

    def _in_full(self, label: Label) -> Label:
        """What stays of the shortened part, as it is called in the whole."""
        further = len(self.short.left_out) if label.block >= FIRST else 0
        return label._replace(block=label.block + further)

    def _source(self, label: Label) -> int:
        """The number that the shortened part has for what stands for a storage of the whole."""
        back = min(len(self.short.left_out), label.block - FIRST + 1)
        return self.numbers[label if back < 0 else label._replace(block=label.block - back)]

    def whole(self, actions: Sequence[list[_Sight]], ops: Sequence[str]) -> StageTraces:
        """The traces of the whole part.

        Args:
            actions: the events of every trace.
        """
        old = self.traces
        given = [
            [self.labels[number] for number in table.values()]
            for table in (old.received, old.arriving)
        ]
        made = [[sight.label for sight in sights if sight.alive] for sights in actions]
        order = itertools.chain(given[0], made[0], given[1], *made[1:])
        numbers = {label: number for number, label in enumerate(dict.fromkeys(order))}
        blocks = {number: self._life(label) for label, number in numbers.items()}
        kept = frozenset(n for label, n in numbers.items() if self._source(label) in old.kept)
        forward, first, first_weight, later, weight = (
            tuple(
                StorageEvent(numbers[s.label], s.alive, self._position(s.block, s.op))
                for s in sights
            )
            for sights in actions
        )

        def renumbered(table: Mapping[str, int]) -> Mapping[str, int]:
            return {name: numbers[self._in_full(self.labels[n])] for name, n in table.items()}

        return StageTraces(
            ops=tuple(ops),
            blocks=blocks,
            received=renumbered(old.received),
            returned=renumbered(old.returned),
            arriving=renumbered(old.arriving),
            sent_back=renumbered(old.sent_back),
            forward=forward,
            kept=kept,
            first_backward=first,
            backward=later,
            first_weight=None if old.first_weight is None else first_weight,
            weight=None if old.weight is None else weight,
        )

    def _life(self, label: Label) -> StorageLife:
        life = self.traces.blocks[self._source(label)]
        return dataclasses.replace(life, op=self._position(label.block, label.op))

    def _position(self, block: int, op: int) -> int:
        """The position of an op in the whole part."""
        if block == _OUTSIDE:
            return self.short.in_full(op)
        return self.short.whole.start + block * self.short.whole.period + op


def _placed(short: ShortStretch, op: int) -> tuple[int, int]:
    """The block of an op at a position of the shortened part, and its position there."""
    stretch = short.stretch
    block = stretch.block(op)
    return (_OUTSIDE, op) if block is None else (block, op - stretch.start - block * stretch.period)


def _are_alike(visits: Sequence[_Visit]) -> bool:
    """Whether these are of the two blocks in the middle, in which the same happens."""
    if {block for block, _ in visits} != {*_MIDDLE}:
        return False
    (one, sights), (other, others) = visits
    return [_further(sight, other - one) for sight in sights] == others


def _further(sight: _Sight, by: int) -> _Sight:
    """The same, some blocks further."""
    label = sight.label
    if label.block != _OUTSIDE:
        label = label._replace(block=label.block + by)
    return sight._replace(block=sight.block + by * (sight.block != _OUTSIDE), label=label)


def _is_near(sight: _Sight, block: int) -> bool:
    """Whether an event is of a storage of the same block, of a neighbour, or of the other end."""
    return sight.label.block == _OUTSIDE or abs(sight.label.block - block) in (0, 1, KEPT - 1)
