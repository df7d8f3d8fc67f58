"""Ops in which a block repeats: each of its ops is like the one a period before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir.ops import ModuleSpec, Op, reading


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a block repeats.

    Attributes:
        start: the position of the first op.
        period: ops in a block.
        count: blocks.
    """

    start: int
    period: int
    count: int

    @property
    def size(self) -> int:
        """All ops of the blocks."""
        return self.period * self.count

    @property
    def end(self) -> int:
        """The position after the last op."""
        return self.start + self.size


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a stretch, by number.

    Attributes:
        all_ops: those of the stretch, and those before and after it.
        modules: the modules that the ops call.
    """

    stretch: Stretch
    all_ops: Sequence[Op]
    modules: Mapping[str, ModuleSpec]

    def end(self, block: int) -> int:
        """The position after the last op of a block."""
        return self.stretch.start + (block + 1) * self.stretch.period

    def ops(self, block: int) -> Sequence[Op]:
        return self.all_ops[self.end(block - 1) : self.end(block)]

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

    def without(self, left_out: range) -> tuple[Op, ...]:
        """All ops but those of some blocks: the block behind them reads of the one before them."""
        before, behind = left_out.start - 1, left_out.stop
        seam = dict(zip(self.values(behind - 1), self.values(before), strict=True))
        return (
            *self.all_ops[: self.end(before)],
            *(reading(op, seam) for op in self.ops(behind)),
            *self.all_ops[self.end(behind) :],
        )
