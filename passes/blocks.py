"""A graph in which blocks repeat, its short form, and how what is known of that one carries over.

The short graph has five of the blocks: the first two, a third, and the last two. What an analysis
finds out about the third it would find out about every block between, as long as that one is given
the like: tensors of equal sizes, strides and types that share memory in the same way. `settled`
makes sure of it on the run that describes the values; from there on it follows step by step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from gpipe_compiler.ir import (
    Argument,
    Graph,
    ModuleCall,
    Op,
    Ref,
    RegionCall,
    Stretch,
)
from gpipe_compiler.ir.arguments import map_argument

T = TypeVar("T")


class IrregularError(Exception):
    """What was found about the short graph does not say what holds for the whole."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A graph with stretches, and how what is known of its short form carries over."""

    graph: Graph

    @classmethod
    def of(cls, graph: Graph) -> Blocks | None:
        """None for a graph in which no block is known to repeat."""
        return cls(graph) if graph.repeats else None

    @cached_property
    def short(self) -> Graph:
        """The graph with five blocks of each stretch."""
        ops: list[Op] = []
        position = 0
        for blocks in self.names:
            ops.extend(self.graph.ops[position : blocks.end(2)])
            last = blocks.stretch.count - 2
            seam = dict(zip(blocks.values(last - 1), blocks.values(2), strict=True))
            ops.extend(reading(op, seam) for op in blocks.ops(last))
            position = blocks.end(last)
        ops.extend(self.graph.ops[position:])
        states = {name for op in ops for name in op.states(self.graph.modules)}
        modules = {op.call.module for op in ops if isinstance(op.call, ModuleCall)}
        inside = (op for op in ops if isinstance(op.call, RegionCall))
        pending = [inner for op in inside for inner in op.call.body.ops]  # type: ignore[union-attr]  # a region, as just asked
        while pending:
            call = pending.pop().call
            if isinstance(call, ModuleCall):
                modules.add(call.module)
            if isinstance(call, RegionCall):
                pending.extend(call.body.ops)
        names = {source.name for source in self.graph.inputs}
        names.update(name for op in ops for name in op.outputs)
        return self.graph.replace(
            ops=tuple(ops),
            state={n: s for n, s in self.graph.state.items() if n in states},
            tensors={n: t for n, t in self.graph.tensors.items() if n in states},
            modules={n: m for n, m in self.graph.modules.items() if n in modules},
            values={n: v for n, v in self.graph.values.items() if n in names},
        )

    def per_op(self, table: Mapping[str, T]) -> dict[str, T]:
        """A table by op of the short graph as one of the whole graph, in its order."""
        return {op.name: table[known] for op, known, _ in self.known() if known in table}

    def per_value(self, table: Mapping[str, T]) -> dict[str, T]:
        """A table by value of the short graph as one of the whole graph, in its order."""
        pairs = [(source.name, source.name) for source in self.graph.inputs]
        for op, told, _ in self.known():
            pairs.extend(zip(op.outputs, self.short.op_of[told].outputs, strict=True))
        return {name: table[told] for name, told in pairs if told in table}

    def known(self) -> Iterator[tuple[Op, str, Meaning]]:
        """Every op, the one of the short graph that tells of it, and how names change with it."""
        position = 0
        for blocks in self.names:
            stretch = blocks.stretch
            for op in self.graph.ops[position : stretch.start]:
                yield op, op.name, self.outside
            for block in range(stretch.count):
                context = Meaning(self, blocks, block)
                source = blocks.ops(blocks.kept(block))
                for op, known in zip(blocks.ops(block), source, strict=True):
                    yield op, known.name, context
            position = stretch.end
        for op in self.graph.ops[position:]:
            yield op, op.name, self.outside

    @cached_property
    def outside(self) -> Meaning:
        """How names change for what is in no stretch: not at all, where it is known at all."""
        return Meaning(self, None, 0)

    @cached_property
    def names(self) -> tuple[BlockNames, ...]:
        """Of every stretch."""
        return tuple(BlockNames(self.graph, stretch) for stretch in self.graph.repeats)

    @cached_property
    def place_of_op(self) -> Mapping[str, tuple[BlockNames, int]]:
        """The stretch and block of every op of the short graph that is in one."""
        return {
            op.name: (blocks, block)
            for blocks in self.names
            for block in blocks.all_kept
            for op in blocks.ops(block)
        }

    @cached_property
    def place(self) -> Mapping[str, tuple[BlockNames, int]]:
        """The stretch and block of every value of the short graph that is in one."""
        return {
            name: (blocks, block)
            for blocks in self.names
            for block in blocks.all_kept
            for name in blocks.values(block)
        }


def reading(op: Op, names: Mapping[str, str]) -> Op:
    """The op, reading other values instead of some.

    Args:
        names: the values that are read, by those that were.
    """

    def leaf(item: Any) -> Argument:
        return Ref(names.get(item.name, item.name)) if isinstance(item, Ref) else item

    call = op.call
    args = map_argument(leaf, call.args)
    if isinstance(call, RegionCall):
        return dataclasses.replace(op, call=dataclasses.replace(call, args=args))
    kwargs = map_argument(leaf, dict(call.kwargs))
    return dataclasses.replace(op, call=dataclasses.replace(call, args=args, kwargs=kwargs))


@dataclass(frozen=True, eq=False)
class BlockNames:
    """The ops, values and states of the blocks of a stretch, in order."""

    graph: Graph
    stretch: Stretch

    def end(self, block: int) -> int:
        """The position after the last op of a block."""
        return self.stretch.start + (block + 1) * self.stretch.period

    def ops(self, block: int) -> tuple[Op, ...]:
        """The ops of a block."""
        return self.graph.ops[self.end(block - 1) : self.end(block)]

    def values(self, block: int) -> list[str]:
        """The values that a block makes."""
        return [name for op in self.ops(block) for name in op.outputs]

    def states(self, block: int) -> list[str]:
        """The states that a block names, as often as it does."""
        return [name for op in self.ops(block) for name in op.states(self.graph.modules)]

    @property
    def all_kept(self) -> tuple[int, ...]:
        """The blocks that the short graph has."""
        count = self.stretch.count
        return (0, 1, 2, count - 2, count - 1)

    def kept(self, block: int) -> int:
        """The block of the short graph that tells of a block."""
        return block if block in self.all_kept else 2

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
    """How the names in what is known of a kept block change for the block that it tells of."""

    def __init__(self, blocks: Blocks, names: BlockNames | None, block: int) -> None:
        self._blocks = blocks
        self._names = names
        self._block = block

    def value(self, name: str) -> str:
        """The value that is meant.

        Raises:
            IrregularError: where that is not known.
        """
        place = self._blocks.place.get(name)
        if place is None:
            return name
        names, block = place
        if self.block(names, block) == block:
            return name
        return self._values[name]

    def block(self, names: BlockNames, block: int) -> int:
        """The block that is meant by one of a stretch.

        Raises:
            IrregularError: where that is not known.
        """
        known = {} if names is not self._names else names.neighbours(self._block)
        if names is not self._names and block != 2:
            return block
        if block not in known:
            raise IrregularError(f"block {block}")
        return known[block]

    def state(self, name: str) -> str:
        """The state that is meant."""
        return self._states.get(name, name)

    @cached_property
    def _values(self) -> Mapping[str, str]:
        assert self._names is not None
        names = self._names
        return {
            old: new
            for known, meant in names.neighbours(self._block).items()
            for old, new in zip(names.values(known), names.values(meant), strict=True)
        }

    @cached_property
    def _states(self) -> Mapping[str, str]:
        if self._names is None:
            return {}
        names = self._names
        return {
            old: new
            for known, meant in names.neighbours(self._block).items()
            for old, new in zip(names.states(known), names.states(meant), strict=True)
        }


def settled(blocks: Blocks, environments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the third block is given the like of what the second one is, and so are all further.

    Args:
        environments: the values of the short graph in some runs.
    """
    return all(
        _is_settled(names, environment) for names in blocks.names for environment in environments
    )


def _is_settled(names: BlockNames, environment: Mapping[str, Any]) -> bool:
    second, third = names.values(1), names.values(2)
    fourth = names.values(names.stretch.count - 2)
    rows = [[environment.get(name) for name in row] for row in (second, third, fourth)]
    if not all(_same(a, b) and _same(b, c) for a, b, c in zip(*rows, strict=True)):
        return False
    inner = {name for block in names.all_kept for name in names.values(block)}
    outer = {
        value.untyped_storage()._cdata: name
        for name, value in environment.items()
        if isinstance(value, torch.Tensor) and name not in inner
    }
    return _sharing(rows[0] + rows[1], outer) == _sharing(rows[1] + rows[2], outer)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.shape == other.shape
            and one.stride() == other.stride()
            and one.storage_offset() == other.storage_offset()
            and one.dtype == other.dtype
            and one.device == other.device
            and one.requires_grad == other.requires_grad
        )
    return type(one) is type(other) and repr(one) == repr(other)


def _sharing(values: Sequence[Any], outer: Mapping[int, str]) -> list[int | str]:
    """Which values share memory with one another, or with which others."""
    numbers: dict[int, int] = {}
    found: list[int | str] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            found.append(outer.get(key) or numbers.setdefault(key, len(numbers)))
    return found


def shortest(graph: Graph) -> Graph:
    """The short graph where a block repeats, else the graph itself."""
    blocks = Blocks.of(graph)
    return graph if blocks is None else blocks.short


def per_op(graph: Graph, table: Mapping[str, T]) -> dict[str, T]:
    """A table by op of the shortest graph, in which no names occur, as one of the whole graph."""
    blocks = Blocks.of(graph)
    return dict(table) if blocks is None else blocks.per_op(table)


def per_value(graph: Graph, table: Mapping[str, T]) -> dict[str, T]:
    """A table by value of the shortest graph as one of the whole graph."""
    blocks = Blocks.of(graph)
    return dict(table) if blocks is None else blocks.per_value(table)
