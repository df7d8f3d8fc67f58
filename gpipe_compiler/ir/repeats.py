"""Finds the blocks that a graph repeats, so that what is asked of each op is asked of one block.

Two ops are alike at a distance when they call the same thing with the same constants, on state of
equal shapes and types, and read what is made at that distance before, or the very same. A stretch
of ops each alike to the one a period earlier is a block that repeats: isomorphic to its neighbours,
wired to the one before it as that to its own. The search is linear in the ops.

The short form of a graph has four of the blocks (`ir.stretches`). What an analysis finds out about
the second it would find out about every block between, as long as that one is given the like:
tensors of equal sizes, strides and types that share memory in the same way. `passes.observe` makes
sure of it in every run; from there on it follows step by step.

These blocks are ops in a row that repeat at once, of whatever module, with the same numbers. Those
of `ir.blocks` are calls of modules, which are written as one class wherever in the model they are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from gpipe_compiler.ir.forms import OpForms
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import ModuleSpec, Op, reading
from gpipe_compiler.ir.stretches import FIRST, KEPT, ShortStretch, Stretch, alike_in_a_row

_LEAST = 8
"""Blocks from which on a stretch is worth the trouble."""

_MOST_PERIODS = 6
"""Distances that are tried, those that most ops repeat at first."""

_MOST_EQUAL = 8
"""Equal ops that a block may have for its period to be found by them."""


def repeats(graph: Graph) -> tuple[Stretch, ...]:
    """The stretches of ops in which a block repeats, in order; they do not overlap.

    Left out is a stretch of whose inner blocks anything but the block itself and the next one
    reads a value: the blocks between could not be left out then.
    """
    alike = _Alike(graph)
    taken = [False] * len(graph.ops)
    found: list[Stretch] = []
    for period in _periods(alike.keys):
        for row in alike_in_a_row(len(taken), period, alike.at(period), _LEAST):
            start = next((place for place in row if not taken[place]), row.stop)
            stretch = Stretch(start, period, (row.stop - start) // period)
            span = range(stretch.start, stretch.end)
            if stretch.count < _LEAST or any(taken[place] for place in span):
                continue
            if Blocks(stretch, graph.ops, graph.modules).is_closed(graph.ends):
                found.append(stretch)
                for place in span:
                    taken[place] = True
    return tuple(sorted(found, key=lambda stretch: stretch.start))


def _periods(keys: Sequence[Hashable]) -> list[int]:
    """Distances at which ops repeat over and over, those that cover the most ops first."""
    places: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    covered: Counter[int] = Counter()
    for at in places.values():
        for lag in range(1, min(_MOST_EQUAL, len(at) // _LEAST) + 1):
            steps = [b - a for a, b in zip(at, at[lag:], strict=False)]
            for step, group in itertools.groupby(steps):
                length = sum(1 for _ in group)
                if length >= (_LEAST - 1) * lag:
                    covered[step] = max(covered[step], step * length // lag)
                    break
    ranked = sorted(covered, key=lambda period: (-covered[period], period))
    return ranked[:_MOST_PERIODS]


class _Alike:
    """Whether ops are alike to those a period before."""

    def __init__(self, graph: Graph) -> None:
        forms = OpForms(graph)
        self.keys = [forms.key(op) for op in graph.ops]
        self._reads = [op.reads for op in graph.ops]
        self._states = [op.states(graph.modules) for op in graph.ops]
        self._made = {name: place for place, op in enumerate(graph.ops) for name in op.outputs}

    def at(self, period: int) -> Callable[[int], bool]:
        """Whether the op at a place is; asked in order.

        Which state stands for which a period later is one for one in a row of such ops.
        """
        later: dict[str, str] = {}
        earlier: dict[str, str] = {}

        def is_alike(place: int) -> bool:
            before = place - period
            ones, others = self._states[before], self._states[place]
            found = (
                self.keys[before] == self.keys[place]
                and all(map(is_read_alike, self._reads[before], self._reads[place]))
                and len(ones) == len(others)
                and all(
                    later.setdefault(one, other) == other and earlier.setdefault(other, one) == one
                    for one, other in zip(ones, others, strict=True)
                )
            )
            if not found:
                later.clear()
                earlier.clear()
            return found

        def is_read_alike(one: str, other: str) -> bool:
            made = self._made.get(one)
            return one == other or (made is not None and self._made.get(other) == made + period)

        return is_alike


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a stretch of ops, by number.

    Attributes:
        all_ops: those of the stretch, and those before and after it.
        modules: the modules that the ops call.
    """

    stretch: Stretch
    all_ops: Sequence[Op]
    modules: Mapping[str, ModuleSpec]

    def ops(self, block: int) -> Sequence[Op]:
        start = self.stretch.start + block * self.stretch.period
        return self.all_ops[start : start + self.stretch.period]

    def values(self, block: int) -> list[str]:
        """The values that a block makes."""
        return [name for op in self.ops(block) for name in op.outputs]

    @cached_property
    def states(self) -> Sequence[Sequence[str]]:
        """For every block the states that it names, as often as it does."""
        return [
            [state for op in self.ops(block) for state in op.states(self.modules)]
            for block in range(self.stretch.count)
        ]

    def is_closed(self, ends: Collection[str]) -> bool:
        """Whether values of the blocks between the first and the last two are read in the block
        itself and the next one only: then all but the first of these can be left out.

        Args:
            ends: the values that are read after the last op.
        """
        inner = range(1, self.stretch.count - 2)
        block_of = {name: block for block in inner for name in self.values(block)}
        if any(name in block_of for name in ends):
            return False
        for position, op in enumerate(self.all_ops):
            block = (position - self.stretch.start) // self.stretch.period
            for name in op.inputs:
                made = block_of.get(name)
                if made is not None and block not in (made, made + 1):
                    return False
        return True

    @property
    def short(self) -> ShortStretch:
        return ShortStretch(self.stretch)

    def shortened(self) -> tuple[Op, ...]:
        """All ops but those of the blocks that are left out: the block behind these reads of the
        one before them."""
        gap, behind = self.short.gap, self.short.left_out.stop
        seam = dict(zip(self.values(behind - 1), self.values(FIRST - 1), strict=True))
        end = gap.stop + self.stretch.period
        return (
            *self.all_ops[: gap.start],
            *(reading(op, seam) for op in self.ops(behind)),
            *self.all_ops[end:],
        )


# --- the short form of a graph --------------------------------------------------------------------


_MIDDLE = FIRST - 1
"""The place of the block that stands for those that are left out."""


class NameKind(IntEnum):
    """What a name is of."""

    STATE = 0
    VALUE = 1
    OP = 2


class Name(NamedTuple):
    """A name in a graph; an op and a value may have the same."""

    kind: NameKind
    name: str


class IrregularError(Exception):
    """What was found about the short graph does not follow for the whole graph."""


@dataclass(frozen=True, eq=False)
class ShortenedGraph:
    """A graph with stretches, and how what is known of its short form carries over."""

    graph: Graph

    @classmethod
    def of(cls, graph: Graph) -> ShortenedGraph | None:
        """None for a graph in which no block is known to repeat."""
        if not graph.repeats:
            return None
        return graph.once(("blocks", graph.repeats), lambda: cls(graph))

    @cached_property
    def short(self) -> Graph:
        """The graph with four blocks of each stretch, without what is known of values."""
        graph, ops = self.graph, self.graph.ops
        for stretch in reversed(graph.repeats):
            ops = Blocks(stretch, ops, graph.modules).shortened()
        return graph.only(ops).replace(values={})

    def known(self) -> Iterator[tuple[Op, str, Meaning]]:
        """Every op, the op of the short graph that stands for it, and how names change with it."""
        outside, position = self.outside, 0
        for names in self.names:
            stretch = names.stretch
            for op in self.graph.ops[position : stretch.start]:
                yield op, op.name, outside
            for block in range(stretch.count):
                place = names.standing_for(block)
                meaning = Meaning(self, names, names.neighbours(block))
                source = names.ops(names.short.all_kept[place])
                for op, known in zip(names.ops(block), source, strict=True):
                    yield op, known.name, meaning
            position = stretch.end
        for op in self.graph.ops[position:]:
            yield op, op.name, outside

    @cached_property
    def outside(self) -> Meaning:
        """How names change for what is in no stretch: not at all, where it is known at all."""
        return Meaning(self, None, {})

    @cached_property
    def names(self) -> tuple[BlockNames, ...]:
        """Of every stretch."""
        graph = self.graph
        return tuple(BlockNames(run, graph.ops, graph.modules) for run in graph.repeats)

    @cached_property
    def place(self) -> Mapping[Name, tuple[BlockNames, int, int]]:
        """For every op and value of a block of the short graph the stretch, which of its blocks
        that stay that is, and where it comes there."""
        return {
            name: (names, place, index)
            for names in self.names
            for place, block in enumerate(names.short.all_kept)
            for index, name in enumerate(names.made[block])
        }

    def further(self, names: BlockNames) -> Meaning:
        """How names change from a block of the short graph to the next one there."""
        return Meaning(self, names, dict(enumerate(names.short.all_kept[1:])))


@dataclass(frozen=True, eq=False)
class BlockNames(Blocks):
    """The names in the blocks of a stretch; those of the short graph have places, from 0 on."""

    @cached_property
    def made(self) -> Sequence[Sequence[Name]]:
        """For every block its ops and the values that they make."""
        return [
            [
                name
                for op in self.ops(block)
                for name in (
                    Name(NameKind.OP, op.name),
                    *(Name(NameKind.VALUE, value) for value in op.outputs),
                )
            ]
            for block in range(self.stretch.count)
        ]

    def standing_for(self, block: int) -> int:
        """The place of the block of the short graph that stands for a block."""
        behind = block - self.short.left_out.stop
        return FIRST + behind if behind >= 0 else min(block, _MIDDLE)

    def neighbours(self, block: int) -> Mapping[int, int]:
        """The places that what is known of a block may speak of, and which blocks it means."""
        place = self.standing_for(block)
        near = range(max(place - 1, 0), min(place + 2, KEPT))
        return {other: block + other - place for other in near}


class Meaning:
    """How names in what is known of the short graph change for the blocks that it stands for.

    Args:
        names: of the stretch, None for what is in none.
        meant: by the places that what is known may speak of, the blocks that are meant.
    """

    def __init__(
        self, blocks: ShortenedGraph, names: BlockNames | None, meant: Mapping[int, int]
    ) -> None:
        self._blocks = blocks
        self._names = names
        self._meant = meant

    def of(self, name: Name) -> Name:
        """The name that is meant.

        Raises:
            IrregularError: where that is not known.
        """
        if name.kind is NameKind.STATE:
            return Name(name.kind, self._states.get(name.name, name.name))
        found = self._blocks.place.get(name)
        if found is None:
            return name
        names, place, index = found
        if names is self._names and place in self._meant:
            return names.made[self._meant[place]][index]
        if names is self._names or place == _MIDDLE:
            raise IrregularError(f"block {place}")
        return name

    @cached_property
    def _states(self) -> Mapping[str, str]:
        if self._names is None:
            return {}
        states, kept = self._names.states, self._names.short.all_kept
        pairs = ((states[kept[place]], states[block]) for place, block in self._meant.items())
        return {old: new for known, meant in pairs for old, new in zip(known, meant, strict=True)}


def shortest(graph: Graph) -> Graph:
    """The short graph where a block repeats, else the graph itself."""
    blocks = ShortenedGraph.of(graph)
    return graph if blocks is None else blocks.short
