"""The live range of every value, and the bytes that live at every position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Graph, ValueKind


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Where a value is alive, in positions.

    Attributes:
        born: the index of the op that makes it; -1 for an input of the graph.
        dies: the index of the last op that reads it; the number of ops for an output or the loss;
            `born` where nothing reads it.
    """

    born: int
    dies: int

    def at(self, position: int) -> bool:
        """Whether the value is alive at a position."""
        return self.born < position <= self.dies


@dataclass(frozen=True)
class Liveness:
    """What is alive where, for one forward of `order`.

    Position p lies before the op of index p; position `len(order)` after the last op. A value is
    live at p when it was made before p (or is an input of the graph) and is read at p or later, or
    is an output or the loss. Parameters and buffers are no values. What autograd keeps for the
    backward does not prolong a life: see `saved_tensors`.

    Values that share memory (views, results of in-place ops) count once, with the bytes of the
    first of them to be made, which is the tensor that the others look into; the memory is live
    while any of them is. Non-tensors are live but weigh nothing.

    Attributes:
        ranges: value -> live range.
        live: for every position, the names of the live values.
        bytes: for every position, bytes of the live storages.
    """

    order: tuple[str, ...]
    ranges: Mapping[str, LiveRange]
    live: tuple[frozenset[str], ...]
    bytes: tuple[int, ...]

    @cached_property
    def peak(self) -> int:
        """The position with the most live bytes, the first of several."""
        return max(range(len(self.bytes)), key=lambda position: (self.bytes[position], -position))


def liveness(graph: Graph, order: Sequence[str] | None = None) -> Liveness:
    """The liveness of an annotated graph.

    Args:
        order: names of all its ops in another legal order; the graph's own by default.

    Raises:
        ValueError: when the graph is not annotated, or `order` is not a permutation of its ops.
    """
    names = tuple(order) if order is not None else tuple(op.name for op in graph.ops)
    if sorted(names) != sorted(op.name for op in graph.ops):
        raise ValueError("the order does not hold every op of the graph exactly once")
    ranges = _ranges(graph, names)
    if ranges.keys() - graph.values.keys():
        raise ValueError("the graph has no table of values: run passes.shapes.annotate first")
    size = storage_bytes(graph, ranges)
    live: list[frozenset[str]] = []
    total: list[int] = []
    starts, ends = _events(ranges)
    current: set[str] = set()
    for position in range(len(names) + 1):
        current -= ends.get(position, set())
        current |= starts.get(position, set())
        live.append(frozenset(current))
        storages = {graph.values[name].storage for name in current}
        total.append(sum(size.get(storage, 0) for storage in storages))
    return Liveness(names, ranges, tuple(live), tuple(total))


def _ranges(graph: Graph, order: Sequence[str]) -> dict[str, LiveRange]:
    born = {source.name: -1 for source in graph.inputs}
    dies = dict(born)
    for index, op_name in enumerate(order):
        op = graph.op_of[op_name]
        for name in op.inputs:
            dies[name] = index
        for name in op.outputs:
            born[name] = dies[name] = index
    dies.update((name, len(order)) for name in graph.ends)
    return {name: LiveRange(born[name], dies[name]) for name in born}


def _events(ranges: Mapping[str, LiveRange]) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
    """The values that start to live at each position, and those that no longer do."""
    starts: dict[int, set[str]] = {}
    ends: dict[int, set[str]] = {}
    for name, span in ranges.items():
        if span.dies > span.born:
            starts.setdefault(span.born + 1, set()).add(name)
            ends.setdefault(span.dies + 1, set()).add(name)
    return starts, ends


def storage_bytes(graph: Graph, ranges: Mapping[str, LiveRange]) -> dict[int, int]:
    """Bytes of every storage: of its first value, or of all that one op makes first (a split)."""
    first: dict[int, int] = {}
    size: dict[int, int] = {}
    for name, span in sorted(ranges.items(), key=lambda item: item[1].born):
        value = graph.values[name]
        if value.kind is not ValueKind.TENSOR:
            continue
        if first.setdefault(value.storage, span.born) == span.born:
            size[value.storage] = size.get(value.storage, 0) + value.bytes
    return size
