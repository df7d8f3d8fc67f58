"""What the cut is asked: a weighted graph without any torch in it.

A problem comes from a `Graph` (`planner/cut_problem.py`) or from measurements somebody else made;
the cut itself sees nothing else. Times are seconds of one micro-batch, sizes are bytes of one
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpipe_compiler.errors import PlanError

BITS = 50
"""Of the sum of all times, or all sizes: what is added up has no digits below these."""

GRAPH_INPUT = -1
"""The producer of a value that the caller passes in: it lies on the first stage."""


@dataclass(frozen=True, slots=True)
class Node:
    """One op, and what it costs.

    Attributes:
        weight_s: the part of `backward_s` that makes the gradients of parameters; schedules that
            split the backward run it later.
    """

    name: str
    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Resident:
    """Something that a stage has in memory, once, where any of these nodes lies in it.

    Attributes:
        users: indices of nodes, ascending.
        bytes: held for good: a parameter, its gradient, what the optimizer knows of it.
        microbatch_bytes: held for every micro-batch between its forward and its backward.
        updated_bytes: of trained parameters, which replicas reduce and the optimizer changes
            after a stage's last backward.
    """

    users: tuple[int, ...]
    bytes: int = 0
    microbatch_bytes: int = 0
    updated_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Seconds:
    """What one node costs on another kind of device; as the fields of `Node`."""

    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """A value that moves when a consumer lies in a later stage than its producer.

    Attributes:
        producer: index of the node that makes it, or `GRAPH_INPUT`.
        consumers: indices of the nodes that read it.
        bytes: what moves forward, once to every later stage with a consumer.
        gradient_bytes: what comes back from each; 0 where no gradient does.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes: float
    gradient_bytes: float = 0


@dataclass(frozen=True)
class CutProblem:
    """A weighted directed acyclic graph to be cut into consecutive down-sets.

    Attributes:
        values: every value that may move; a value is an edge from producer to each consumer.
        precedence: further edges (before, after) over which nothing moves.
        groups: nodes that must stay in one stage (atoms).
        last: nodes that must lie in the last stage; so must all that follow from them.
        last_alone: whether these may make up the last stage by themselves.
        kept: what the nodes keep in memory.
        other_kinds: for each further kind of device, the costs of all nodes on it. The costs of
            `nodes` are those on kind 0.
        pinned: (node, stage) pairs.
        apart: (before, after) pairs of nodes that must lie in different stages.
    """

    nodes: tuple[Node, ...]
    values: tuple[Traffic, ...] = ()
    precedence: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    last: frozenset[int] = frozenset()
    last_alone: bool = True
    kept: tuple[Resident, ...] = ()
    other_kinds: tuple[tuple[Seconds, ...], ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()
    apart: tuple[tuple[int, int], ...] = ()

    def edges(self) -> Iterator[tuple[int, int]]:
        for value in self.values:
            if value.producer != GRAPH_INPUT:
                yield from ((value.producer, consumer) for consumer in value.consumers)
        yield from self.precedence

    def forward_only(self) -> CutProblem:
        return replace(
            self,
            nodes=tuple(replace(node, backward_s=0.0, weight_s=0.0) for node in self.nodes),
            values=tuple(replace(value, gradient_bytes=0) for value in self.values),
            kept=tuple(replace(kept, microbatch_bytes=0, updated_bytes=0) for kept in self.kept),
            other_kinds=tuple(
                tuple(Seconds(seconds.forward_s) for seconds in kind) for kind in self.other_kinds
            ),
        )

    def check(self) -> CutProblem:
        """The same problem, when indices are in range and times are not negative.

        Times and sizes are rounded to whole multiples of a power of two, such that all sums of them
        are exact: in which order a processor adds them makes no cut better than another.

        Raises:
            PlanError: with the first fault. Cycles are found when the problem is contracted.
        """
        size = len(self.nodes)
        for node in self.nodes:
            if not (node.forward_s >= 0 and node.backward_s >= 0):
                raise PlanError(f"the op {node.name} takes less than no time")
        for value in self.values:
            if value.bytes < 0 or value.gradient_bytes < 0:
                raise PlanError(f"the value {value.name} has fewer than no bytes")
            ends = (*value.consumers, *(() if value.producer == GRAPH_INPUT else (value.producer,)))
            _in_range(ends, size, f"the value {value.name}")
        for pair in self.precedence:
            _in_range(pair, size, "a precedence")
        for group in (*self.groups, tuple(self.last)):
            _in_range(group, size, "a group")
        return self._summable()

    def _summable(self) -> CutProblem:
        nodes = [Seconds(node.forward_s, node.backward_s, node.weight_s) for node in self.nodes]
        kinds = (nodes, *self.other_kinds)
        unit_s = _unit(max(s.forward_s + s.backward_s for s in n) for n in zip(*kinds, strict=True))
        seconds = [
            [
                Seconds(*(_rounded(own, unit_s) for own in (n.forward_s, n.backward_s, n.weight_s)))
                for n in kind
            ]
            for kind in kinds
        ]
        unit = _unit(value.bytes + value.gradient_bytes for value in self.values)
        return replace(
            self,
            nodes=tuple(
                Node(node.name, s.forward_s, s.backward_s, s.weight_s)
                for node, s in zip(self.nodes, seconds[0], strict=True)
            ),
            values=tuple(
                replace(
                    value,
                    bytes=_rounded(value.bytes, unit),
                    gradient_bytes=_rounded(value.gradient_bytes, unit),
                )
                for value in self.values
            ),
            other_kinds=tuple(map(tuple, seconds[1:])),
        )


def _unit(numbers: Iterable[float]) -> float:
    """A power of two, of which the sum of these numbers is fewer than 2 to the `BITS`."""
    return math.ldexp(1.0, math.frexp(math.fsum(numbers))[1] - BITS)


def _rounded(number: float, unit: float) -> float:
    """The nearest whole multiple of a unit."""
    whole = not unit or (number / unit).is_integer()
    return number if whole else round(number / unit) * unit


def _in_range(indices: Iterable[int], size: int, what: str) -> None:
    for index in indices:
        if not 0 <= index < size:
            raise PlanError(f"{what} names the node {index} of {size}")
