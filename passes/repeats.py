"""Finds the blocks that a graph repeats, so that what is asked of each op is asked of one block.

Two ops are alike at a distance when they call the same thing with the same constants, on state of
equal shapes and types, and read what is made at that distance before, or the very same. A stretch
of ops each alike to the one a period earlier is a block that repeats: isomorphic to its neighbours,
wired to the one before it as that to its own. The search is linear in the ops.

The short form of a graph has five of the blocks: the first two, a third, and the last two. What an
analysis finds out about the third it would find out about every block between, as long as that one
is given the like: tensors of equal sizes, strides and types that share memory in the same way.
`passes.observe` makes sure of it in every run; from there on it follows step by step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from gpipe_compiler.ir import Graph, ModuleCall, Op, Stretch, ops_within
from gpipe_compiler.ir.forms import OpForms
from gpipe_compiler.ir.stretches import Blocks

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
    shapes = OpForms(graph)
    keys = [shapes.key(op) for op in graph.ops]
    reads = [_Reads(op.reads, op.states(graph.modules)) for op in graph.ops]
    taken = [False] * len(keys)
    found: list[Stretch] = []
    for period in _periods(keys):
        for first, end in _alike(graph, keys, reads, period):
            start = first - period
            while start < end and taken[start]:  # the end of the stretch before
                start += 1
            stretch = Stretch(start, period, (end - start) // period)
            span = range(stretch.start, stretch.end)
            if stretch.count < _LEAST or any(taken[index] for index in span):
                continue
            if Blocks(stretch, graph.ops, graph.modules).is_closed(graph.ends):
                found.append(stretch)
                for index in span:
                    taken[index] = True
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


class _Reads(NamedTuple):
    """The values that an op reads, and the states."""

    refs: Sequence[str]
    states: Sequence[str]


def _alike(
    graph: Graph, keys: Sequence[Hashable], reads: Sequence[_Reads], period: int
) -> Iterator[tuple[int, int]]:
    """The longest stretches of ops that are alike to those a period before, as half-open ranges."""
    made = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    states = _StateMap()
    start = period
    for index in range(period, len(keys) + 1):
        if index < len(keys) and keys[index] == keys[index - period]:
            one, other = reads[index - period], reads[index]
            if all(
                a == b or (a in made and made.get(b, -1) - made[a] == period)
                for a, b in zip(one.refs, other.refs, strict=True)
            ) and states.agree(one.states, other.states):
                continue
        if index - start >= (_LEAST - 1) * period:
            yield start, index
        start = index + 1
        states = _StateMap()


class _StateMap:
    """Which state stands for which a period later: one for one, as far as seen."""

    def __init__(self) -> None:
        self._later: dict[str, str] = {}
        self._earlier: dict[str, str] = {}

    def agree(self, ones: Sequence[str], others: Sequence[str]) -> bool:
        """Whether these pairs go with those seen before."""
        if len(ones) != len(others):
            return False
        return all(
            self._later.setdefault(one, other) == other
            and self._earlier.setdefault(other, one) == one
            for one, other in zip(ones, others, strict=True)
        )


# --- the short form of a graph --------------------------------------------------------------------


_MIDDLE = 2
"""The kept block that stands for those that are left out."""


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
        """The graph with five blocks of each stretch, without what is known of values."""
        ops = self.graph.ops
        for names in reversed(self.names):
            left_out = range(_MIDDLE + 1, names.stretch.count - 2)
            ops = Blocks(names.stretch, ops, self.graph.modules).without(left_out)
        states = {name for op in ops for name in op.states(self.graph.modules)}
        calls = (inner.call for op in ops for inner in ops_within(op))
        modules = {call.module for call in calls if isinstance(call, ModuleCall)}
        return self.graph.replace(
            ops=ops,
            state={n: s for n, s in self.graph.state.items() if n in states},
            tensors={n: t for n, t in self.graph.tensors.items() if n in states},
            modules={n: m for n, m in self.graph.modules.items() if n in modules},
            values={},
        )

    def known(self) -> Iterator[tuple[Op, str, Meaning]]:
        """Every op, the op of the short graph that stands for it, and how names change with it."""
        position = 0
        for blocks in self.names:
            stretch = blocks.stretch
            for op in self.graph.ops[position : stretch.start]:
                yield op, op.name, self.outside
            for block, meaning in enumerate(self._meanings[blocks]):
                source = blocks.ops(blocks.kept(block))
                for op, known in zip(blocks.ops(block), source, strict=True):
                    yield op, known.name, meaning
            position = stretch.end
        for op in self.graph.ops[position:]:
            yield op, op.name, self.outside

    @cached_property
    def _meanings(self) -> Mapping[BlockNames, Sequence[Meaning]]:
        return {
            names: [
                Meaning(self, names, names.neighbours(block))
                for block in range(names.stretch.count)
            ]
            for names in self.names
        }

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
    def place(self) -> Mapping[Name, tuple[BlockNames, int]]:
        """The stretch and block of every op and value of the short graph that is in one."""
        return {
            name: (blocks, block)
            for blocks in self.names
            for block in blocks.all_kept
            for name in blocks.made(block)
        }

    def further(self, names: BlockNames) -> Meaning:
        """How names change from a block of the short graph to the next one there."""
        return Meaning(self, names, dict(itertools.pairwise(names.all_kept)))


@dataclass(frozen=True, eq=False)
class BlockNames(Blocks):
    """The names in the blocks of a stretch, and which blocks the short graph has."""

    def made(self, block: int) -> Iterator[Name]:
        """The ops of a block and the values that they make."""
        for op in self.ops(block):
            yield Name(NameKind.OP, op.name)
            yield from (Name(NameKind.VALUE, value) for value in op.outputs)

    def named(self, block: int) -> Iterator[Name]:
        """The states that a block names, as often as it does."""
        return (Name(NameKind.STATE, state) for state in self.states[block])

    @property
    def all_kept(self) -> tuple[int, ...]:
        """The blocks that the short graph has."""
        count = self.stretch.count
        return (0, 1, _MIDDLE, count - 2, count - 1)

    def kept(self, block: int) -> int:
        """The block of the short graph that stands for a block."""
        return block if block in self.all_kept else _MIDDLE

    def neighbours(self, block: int) -> Mapping[int, int]:
        """The kept blocks that what is known of a block may speak of, and which ones it means."""
        last = self.stretch.count - 1
        if block < 2:
            return {0: 0, 1: 1} | ({2: 2} if block else {})
        if block == last:
            return {last - 1: last - 1, last: last}
        if block == last - 1:
            return {2: block - 1, block: block, last: last}
        return {1: block - 1, 2: block, last - 1: block + 1}


class Meaning:
    """How names in what is known of kept blocks change for the blocks that they stand for.

    Args:
        names: of the stretch, None for what is in none.
        meant: by kept blocks that what is known may speak of, the blocks that those stand for.
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
            return self._states.get(name, name)
        place = self._blocks.place.get(name)
        if place is None:
            return name
        names, block = place
        if names is self._names and block in self._meant:
            return self._made[name]
        if names is self._names or block == _MIDDLE:
            raise IrregularError(f"block {block}")
        return name

    @cached_property
    def _made(self) -> Mapping[Name, Name]:
        return {} if self._names is None else self._pairs(self._names.made)

    @cached_property
    def _states(self) -> Mapping[Name, Name]:
        return {} if self._names is None else self._pairs(self._names.named)

    def _pairs(self, named: Callable[[int], Iterable[Name]]) -> Mapping[Name, Name]:
        return {
            old: new
            for known, meant in self._meant.items()
            for old, new in zip(named(known), named(meant), strict=True)
        }


def shortest(graph: Graph) -> Graph:
    """The short graph where a block repeats, else the graph itself."""
    blocks = ShortenedGraph.of(graph)
    return graph if blocks is None else blocks.short
