"""What was seen on meta tensors: the ops that make or write them, and what each reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
"""Ops that make a new tensor and leave it as it comes."""

FILLS: Mapping[str, str] = MappingProxyType(
    {
        "zeros": "zero_",
        "zeros_like": "zero_",
        "new_zeros": "zero_",
        "ones": "fill_",
        "ones_like": "fill_",
        "new_ones": "fill_",
        "full": "fill_",
        "full_like": "fill_",
        "new_full": "fill_",
        "rand": "uniform_",
        "rand_like": "uniform_",
        "randn": "normal_",
        "randn_like": "normal_",
    }
)
"""Ops that make a new tensor and fill it without reading another, and the method that fills."""

_WHOLE = frozenset(
    {
        *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_"),
        *("log_normal_", "cauchy_", "geometric_", "random_"),
        *("trunc_normal_", "orthogonal_", "sparse_", "dirac_", "eye_"),
    }
)
"""Methods after which nothing is left of what a tensor held."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as a view of a storage; `nbytes` is the size of the whole storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether it shows all of its storage, every element once."""
        count = math.prod(self.size)
        span = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset == 0 and count * self.dtype.itemsize == self.nbytes and span <= count

    @property
    def shown(self) -> tuple[object, ...]:
        """What makes two operands of one storage the same tensor."""
        return (self.size, self.stride, self.offset, self.dtype)


@dataclass(frozen=True, slots=True)
class InitOp:
    """An op; tensors among its arguments are operands, or literals where they were real.

    Attributes:
        created: the new tensors, by which of its results they are.
        understood: False where it cannot be written as a step.
    """

    op: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    created: Mapping[int, Operand]
    written: tuple[int, ...]
    several: bool
    random: bool
    understood: bool

    @property
    def reads_nothing(self) -> bool:
        """Whether it makes a tensor whatever its arguments hold."""
        return self.op in EMPTY or self.op in FILLS

    @property
    def read(self) -> set[int]:
        """The storages whose content matters to it."""
        if self.reads_nothing:
            return set()
        operands = list(operands_in((self.args, self.options)))
        if self.overwrites is not None:
            operands = operands[1:]
        return {operand.storage for operand in operands}

    @property
    def overwrites(self) -> int | None:
        """The storage of which nothing is left."""
        if self.op not in _WHOLE or not self.args or not isinstance(self.args[0], Operand):
            return None
        return self.args[0].storage if self.args[0].whole else None


def operands_in(tree: Any) -> Iterator[Operand]:
    """The operands among arguments, however deep in tuples and lists."""
    if isinstance(tree, Operand):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from operands_in(item)
