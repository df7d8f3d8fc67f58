"""Finds the blocks that a graph repeats, so that what is asked of each op is asked of one block.

Two ops are alike at a distance when they call the same thing with the same constants, on state of
equal shapes and types, and read what is made at that distance before, or the very same. A stretch
of ops each alike to the one a period earlier is a block that repeats: isomorphic to its neighbours,
wired to the one before it as that to its own. The search is linear in the ops.

`passes.blocks` makes the short graph of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from gpipe_compiler.ir import Graph, Stretch
from gpipe_compiler.ir.forms import OpForms

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
            if _is_closed(graph, stretch):
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


def _is_closed(graph: Graph, stretch: Stretch) -> bool:
    """Whether the values of inner blocks are read in the block itself and the next one only."""
    block_of = {
        name: (index - stretch.start) // stretch.period
        for index in range(stretch.start, stretch.end)
        for name in graph.ops[index].outputs
    }
    inner = range(1, stretch.count - 2)
    if any(block_of.get(name, -1) in inner for name in graph.ends):
        return False
    for index, op in enumerate(graph.ops):
        within = stretch.start <= index < stretch.end
        block = (index - stretch.start) // stretch.period if within else -1
        for name in op.inputs:
            made = block_of.get(name, -1)
            if made in inner and block not in (made, made + 1):
                return False
    return True
