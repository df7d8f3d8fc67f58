"""What the cut is asked: a weighted graph without any torch in it.

A problem comes from a `Graph` (`cut_graph.py`) or from measurements somebody else made; the cut
itself sees nothing else. Times are seconds of one micro-batch, sizes are bytes of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpipe_compiler.errors import PlanError

GRAPH_INPUT = -1
"""The producer of a value that the caller passes in: it lies on the first stage."""


@dataclass(frozen=True, slots=True)
class Node:
    """One op: what it costs and what it keeps."""

    name: str
    forward_s: float
    backward_s: float = 0.0
    saved_bytes: int = 0
    parameter_bytes: int = 0


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
    bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True)
class CutProblem:
    """A weighted directed acyclic graph to be cut into consecutive down-sets.

    Attributes:
        values: every value that may move; a value is an edge from producer to each consumer.
        precedence: further edges (before, after) over which nothing moves.
        groups: nodes that must stay in one stage (atoms).
        last: nodes that must lie in the last stage; so must all that follow from them.
        last_alone: whether these may make up the last stage by themselves.
    """

    nodes: tuple[Node, ...]
    values: tuple[Traffic, ...] = ()
    precedence: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    last: frozenset[int] = frozenset()
    last_alone: bool = True

    def edges(self) -> Iterator[tuple[int, int]]:
        """Every (before, after) pair of nodes, some perhaps twice."""
        for value in self.values:
            if value.producer != GRAPH_INPUT:
                yield from ((value.producer, consumer) for consumer in value.consumers)
        yield from self.precedence

    def forward_only(self) -> CutProblem:
        """The same problem for inference: nothing goes backward."""
        return replace(
            self,
            nodes=tuple(replace(node, backward_s=0.0) for node in self.nodes),
            values=tuple(replace(value, gradient_bytes=0) for value in self.values),
        )

    def check(self) -> CutProblem:
        """The same problem, when indices are in range and times are not negative.

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
        return self


def _in_range(indices: Iterable[int], size: int, what: str) -> None:
    for index in indices:
        if not 0 <= index < size:
            raise PlanError(f"{what} names the node {index} of {size}")
