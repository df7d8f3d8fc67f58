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

from gpipe_compiler.passes.allocation_trace import (
    NO_OP,
    AllocationTrace,
    BlockKind,
    StageTraces,
    StorageEvent,
    StorageLife,
    forward_alone,
)
from gpipe_compiler.passes.memory_trace.shorten import FIRST, KEPT, Gap

_FEW = 2
"""Storages that no op made, at most: of more, one might belong to every block."""

_RECEIVED, _FORWARD, _ARRIVING, _LATER = 0, 1, 2, 5
"""Phases: of what is received, of the forward, of what arrives, of a later backward."""

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
    """An event, by labels."""

    op: int
    alive: bool
    label: Label


_Visit: TypeAlias = tuple[int, list[_Sight]]
"""What happens in a row in one block, or outside of all."""


def expanded(traces: StageTraces, gap: Gap, ops: Sequence[str]) -> StageTraces | None:
    """The traces of the whole part.

    Returns:
        None where the blocks in the middle are not seen to be alike.
    """
    short = _Short.of(traces, gap)
    if traces.growth is not None or not short.is_regular():
        return None
    actions = _actions(traces)
    longer = [None if trace is None else short.longer(trace) for trace in actions]
    if longer.count(None) > actions.count(None):
        return None
    return _Long(short, longer, ops).traces()


def _actions(traces: StageTraces) -> list[AllocationTrace | None]:
    """The traces in the order in which they are made, those that there are not None."""
    return [
        traces.forward,
        traces.first_backward,
        traces.first_weight,
        traces.backward,
        traces.weight,
    ]


@dataclass(frozen=True)
class _Short:
    """The traces of a shortened part.

    Attributes:
        labels: of all storages, by number.
        numbers: the other way round.
    """

    traces: StageTraces
    gap: Gap
    labels: Mapping[int, Label]
    numbers: Mapping[Label, int]

    @classmethod
    def of(cls, traces: StageTraces, gap: Gap) -> _Short:
        counts: Counter[tuple[int, int]] = Counter()
        labels: dict[int, Label] = {}

        def label(number: int, op: int, phase: int) -> None:
            if number not in labels:
                block = _block(gap, op)
                at = op if block == _OUTSIDE else op - gap.start - block * gap.period
                labels[number] = Label(block, at, phase, counts[op, phase])
                counts[op, phase] += 1

        for number in traces.received.values():
            label(number, NO_OP, _RECEIVED)
        for number in traces.arriving.values():
            label(number, NO_OP, _ARRIVING)
        phases = (_FORWARD, *range(_ARRIVING + 1, _LATER + 2))
        for phase, trace in zip(phases, _actions(traces), strict=True):
            for event in () if trace is None else trace.events:
                if event.alive:
                    label(event.block, event.op, phase)
        return cls(traces, gap, labels, {label: number for number, label in labels.items()})

    def is_regular(self) -> bool:
        """Whether storages of the second block are like those of the third, and none is of all."""
        traces, period = self.traces, self.gap.period
        rows: list[set[object]] = [set(), set()]
        for number, label in self.labels.items():
            if label.block in (FIRST - 1, FIRST):
                found = traces.blocks[number]
                at = found.op - label.block * period
                row = label[1:], dataclasses.replace(found, op=at), number in traces.kept
                rows[label.block - FIRST + 1].add(row)
        handed = (*traces.returned.values(), *traces.sent_back.values())
        of_none = Counter(
            label.phase
            for label in self.labels.values()
            if label.op == NO_OP and label.phase not in (_RECEIVED, _ARRIVING)
        )
        # A loss has a gradient of its own, which is made in two steps.
        return (
            rows[0] == rows[1]
            and all(count <= _FEW for count in of_none.values())
            and not any(self.labels[number].block in (FIRST - 1, FIRST) for number in handed)
        )

    def longer(self, trace: AllocationTrace) -> list[_Sight] | None:
        """The events of the whole part; None where what is left out is not known."""
        visits = list(self._visits(trace))
        if not all(_is_near(sight, block) for block, sights in visits for sight in sights):
            return None
        found: list[_Sight] = []
        between: Iterable[int] | None = None
        for index, (block, sights) in enumerate(visits):
            if block in (FIRST - 1, FIRST):
                if between is None:
                    if not self._alike(visits[index : index + 2]):
                        return None
                    further = range(1, self.gap.removed + 1)
                    between = further if block < FIRST else reversed(further)
                else:
                    second = sights if block < FIRST else visits[index - 1][1]
                    for by in between:
                        found.extend(self._moved(second, by))
                    between = None
            found.extend(self._moved(sights, self.gap.removed if block >= FIRST else 0))
        return found

    def in_full(self, label: Label) -> Label:
        """What stays of the shortened part, as it is called in the whole."""
        return _further(label, self.gap.removed) if label.block >= FIRST else label

    def _visits(self, trace: AllocationTrace) -> Iterator[_Visit]:
        """The events of a trace, block by block; what ends together in the order of its blocks."""
        sights: list[tuple[int, _Sight]] = []
        for (op, alive), group in itertools.groupby(trace.events, lambda e: (e.op, e.alive)):
            labels = [self.labels[event.block] for event in group]
            at = _block(self.gap, op)
            sights.extend(
                (label.block if at == _OUTSIDE else at, _Sight(op, alive, label))
                for label in (labels if alive else sorted(labels))
            )
        for block, visit in itertools.groupby(sights, lambda sight: sight[0]):
            yield block, [sight for _, sight in visit]

    def _alike(self, visits: Sequence[_Visit]) -> bool:
        """Whether these are of the two blocks in the middle, in which the same happens."""
        if {block for block, _ in visits} != {FIRST - 1, FIRST}:
            return False
        (one, sights), (other, others) = visits
        return list(self._placed(sights, other - one)) == others

    def _placed(self, sights: Iterable[_Sight], by: int) -> Iterator[_Sight]:
        """The same, some blocks further in the shortened part."""
        for op, alive, label in sights:
            inside = _block(self.gap, op) != _OUTSIDE
            yield _Sight(op + by * self.gap.period if inside else op, alive, _further(label, by))

    def _moved(self, sights: Iterable[_Sight], by: int) -> Iterator[_Sight]:
        """The same, some blocks further in the whole part."""
        for op, alive, label in sights:
            inside = _block(self.gap, op) != _OUTSIDE
            at = op + by * self.gap.period if inside else self.gap.in_full(op)
            # What the first and the last have in common they have whatever is between them.
            common = inside and abs(_block(self.gap, op) - label.block) == KEPT - 1
            yield _Sight(at, alive, self.in_full(label) if common else _further(label, by))


def _block(gap: Gap, op: int) -> int:
    block = None if op == NO_OP else gap.block(op)
    return _OUTSIDE if block is None else block


def _further(label: Label, by: int) -> Label:
    if label.block == _OUTSIDE:
        return label
    return label._replace(block=label.block + by)


def _is_near(sight: _Sight, block: int) -> bool:
    """Whether an event is of a storage of the same block, of a neighbour, or of the other end."""
    return sight.label.block == _OUTSIDE or abs(sight.label.block - block) in (0, 1, KEPT - 1)


class _Long:
    """Puts together the traces of the whole part.

    Args:
        actions: the events of every trace that there is, in the order of `_actions`.
    """

    def __init__(
        self, short: _Short, actions: Sequence[list[_Sight] | None], ops: Sequence[str]
    ) -> None:
        self._short = short
        self._actions = actions
        self._ops = ops
        self._numbers = self._numbered()

    def traces(self) -> StageTraces:
        old = self._short.traces
        blocks = {number: self._storage_life(label) for label, number in self._numbers.items()}
        forward, first, first_weight, later, weight = map(self._trace, self._actions)
        assert forward is not None
        assert first is not None
        assert later is not None
        kept = frozenset(
            number
            for label, number in self._numbers.items()
            if self._short.numbers[self._source(label)] in old.kept
        )
        return StageTraces(
            ops=tuple(self._ops),
            blocks=dict(sorted(blocks.items())),
            received=self._renumbered(old.received),
            returned=self._renumbered(old.returned),
            arriving=self._renumbered(old.arriving),
            sent_back=self._renumbered(old.sent_back),
            forward=forward,
            kept=kept,
            forward_again=forward_alone(forward, kept, blocks),
            first_backward=first,
            backward=later,
            first_weight=first_weight,
            weight=weight,
        )

    def _numbered(self) -> dict[Label, int]:
        """Every storage with its number: they come one after another, in two micro-batches."""
        short = self._short
        received = [short.labels[number] for number in short.traces.received.values()]
        arriving = [short.labels[number] for number in short.traces.arriving.values()]
        forward, *backward = (
            [sight.label for sight in sights or () if sight.alive] for sights in self._actions
        )
        first = [*received, *forward, *arriving, *backward[0], *backward[1]]
        numbers = {label: number for number, label in enumerate(first)}
        casts = sum(
            short.traces.blocks[short.numbers[self._source(label)]].kind is BlockKind.CAST
            for label in forward
        )
        again = len(received) + len(forward) - casts + len(arriving)
        for number, label in enumerate((*backward[2], *backward[3]), len(first) + again):
            numbers.setdefault(label, number)
        return numbers

    def _source(self, label: Label) -> Label:
        removed = self._short.gap.removed
        if label.block < FIRST:
            return label
        return _further(label, -min(removed, label.block - FIRST + 1))

    def _storage_life(self, label: Label) -> StorageLife:
        short = self._short
        source = self._source(label)
        block = short.traces.blocks[short.numbers[source]]
        if label.block == _OUTSIDE:
            op = short.gap.in_full(block.op)
        else:
            op = block.op + (label.block - source.block) * short.gap.period
        return dataclasses.replace(block, op=op)

    def _trace(self, sights: Sequence[_Sight] | None) -> AllocationTrace | None:
        if sights is None:
            return None
        return AllocationTrace(
            tuple(StorageEvent(self._numbers[s.label], s.alive, s.op) for s in sights)
        )

    def _renumbered(self, table: Mapping[str, int]) -> Mapping[str, int]:
        short = self._short
        return {
            name: self._numbers[short.in_full(short.labels[number])]
            for name, number in table.items()
        }
