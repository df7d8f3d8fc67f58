"""Sizes that vary from call to call, what is computed from them, and what must hold of them.

tokens = Size("tokens", of=("input_ids", 1), example=64)
shape = (8, tokens // 2 + 1, 512)
shape_at(shape, {"tokens": 48})  # (8, 25, 512)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Operator(Enum):
    """How two numbers make one; the values are as Python writes them."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    FLOOR_DIVIDE = "//"
    REMAINDER = "%"
    SMALLER = "smaller"
    LARGER = "larger"

    def __call__(self, left: int, right: int) -> int:
        return _APPLIED[self](left, right)


_APPLIED: Mapping[Operator, Callable[[int, int], int]] = {
    Operator.ADD: operator.add,
    Operator.SUBTRACT: operator.sub,
    Operator.MULTIPLY: operator.mul,
    Operator.FLOOR_DIVIDE: operator.floordiv,
    Operator.REMAINDER: operator.mod,
    Operator.SMALLER: min,
    Operator.LARGER: max,
}


class Expression:
    """A number that follows from the sizes of a call; `+ - * // %` make further ones."""

    __slots__ = ()

    def at(self, sizes: Sizes) -> int:
        """The number at these sizes, by name.

        Raises:
            KeyError: when it depends on another size.
        """
        raise NotImplementedError

    def sizes(self) -> Iterator[Size]:
        """The sizes that it depends on, as often as they stand in it."""
        raise NotImplementedError

    def python(self, names: Mapping[str, str] | None = None) -> str:
        """The expression as Python source.

        Args:
            names: for names of sizes, the variables that hold them; a size not among them stands
                under its own name.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return self.python()

    def __add__(self, other: Dim) -> Operation:
        return Operation(Operator.ADD, self, other)

    def __radd__(self, other: int) -> Operation:
        return Operation(Operator.ADD, other, self)

    def __sub__(self, other: Dim) -> Operation:
        return Operation(Operator.SUBTRACT, self, other)

    def __rsub__(self, other: int) -> Operation:
        return Operation(Operator.SUBTRACT, other, self)

    def __mul__(self, other: Dim) -> Operation:
        return Operation(Operator.MULTIPLY, self, other)

    def __rmul__(self, other: int) -> Operation:
        return Operation(Operator.MULTIPLY, other, self)

    def __floordiv__(self, other: Dim) -> Operation:
        return Operation(Operator.FLOOR_DIVIDE, self, other)

    def __rfloordiv__(self, other: int) -> Operation:
        return Operation(Operator.FLOOR_DIVIDE, other, self)

    def __mod__(self, other: Dim) -> Operation:
        return Operation(Operator.REMAINDER, self, other)

    def __rmod__(self, other: int) -> Operation:
        return Operation(Operator.REMAINDER, other, self)


@dataclass(frozen=True, slots=True)
class Size(Expression):
    """A dimension of an input that may differ from call to call.

    Attributes:
        of: the input's name, and the number of the dimension.
        example: the size that the package was compiled with.
    """

    name: str
    of: tuple[str, int]
    example: int

    def at(self, sizes: Sizes) -> int:
        return sizes[self.name]

    def sizes(self) -> Iterator[Size]:
        yield self

    def python(self, names: Mapping[str, str] | None = None) -> str:
        """The variable that holds it, or its name."""
        return (names or {}).get(self.name, self.name)


@dataclass(frozen=True, slots=True)
class Operation(Expression):
    """What an operator makes of two numbers."""

    applied: Operator
    left: Dim
    right: Dim

    def at(self, sizes: Sizes) -> int:
        return self.applied(value_at(self.left, sizes), value_at(self.right, sizes))

    def sizes(self) -> Iterator[Size]:
        yield from sizes_in((self.left, self.right))

    def python(self, names: Mapping[str, str] | None = None) -> str:
        """The operation, in as few parentheses as tell it apart."""
        left, right = (
            item.python(names) if isinstance(item, Expression) else str(item)
            for item in (self.left, self.right)
        )
        if _strength(self) == _CALL:
            return f"{self.applied.value}({left}, {right})"
        if _strength(self.left) < _strength(self):
            left = f"({left})"
        if _strength(self.right) <= _strength(self):
            right = f"({right})"
        return f"{left} {self.applied.value} {right}"


Dim: TypeAlias = int | Expression
"""A dimension: a number, or what it follows from."""

Sizes: TypeAlias = Mapping[str, int]
"""The sizes of a call, by name."""

Shape: TypeAlias = tuple[Dim, ...]
"""The dimensions of a tensor."""

_SUM, _PRODUCT, _CALL = range(3)


def _strength(item: Dim) -> int:
    """How strongly an expression holds together where Python reads it."""
    match item:
        case Operation(applied=Operator.ADD | Operator.SUBTRACT):
            return _SUM
        case Operation(applied=Operator.SMALLER | Operator.LARGER):
            return _CALL
        case Operation():
            return _PRODUCT
        case int() if item < 0:
            return _SUM
        case _:
            return _CALL


def smaller(left: Dim, right: Dim) -> Operation:
    return Operation(Operator.SMALLER, left, right)


def larger(left: Dim, right: Dim) -> Operation:
    return Operation(Operator.LARGER, left, right)


def value_at(dim: Dim, sizes: Sizes) -> int:
    return dim.at(sizes) if isinstance(dim, Expression) else dim


def shape_at(shape: Sequence[Dim], sizes: Sizes) -> tuple[int, ...]:
    return tuple(value_at(dim, sizes) for dim in shape)


def example_shape(shape: Sequence[Dim]) -> tuple[int, ...]:
    """A shape at the sizes that the package was compiled with."""
    return shape_at(shape, {size.name: size.example for size in sizes_in(shape)})


def sizes_in(dims: Sequence[Dim]) -> Iterator[Size]:
    """The sizes that dimensions depend on, as often as they stand there."""
    for dim in dims:
        if isinstance(dim, Expression):
            yield from dim.sizes()


class Relation(Enum):
    """What may hold between two numbers; the values are as they are written."""

    EQUAL = "=="
    UNEQUAL = "!="
    LESS = "<"
    AT_MOST = "<="
    DIVISIBLE = "divisible by"

    def __call__(self, left: int, right: int) -> bool:
        return _HOLDS[self](left, right)


_HOLDS: Mapping[Relation, Callable[[int, int], bool]] = {
    Relation.EQUAL: operator.eq,
    Relation.UNEQUAL: operator.ne,
    Relation.LESS: operator.lt,
    Relation.AT_MOST: operator.le,
    Relation.DIVISIBLE: lambda left, right: right != 0 and left % right == 0,
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """What the model demands of the sizes of a call.

    Attributes:
        where: the file and line of the model that demands it, with what stands there.
    """

    left: Dim
    relation: Relation
    right: Dim
    where: str

    def holds(self, sizes: Sizes) -> bool:
        return self.relation(value_at(self.left, sizes), value_at(self.right, sizes))

    def __str__(self) -> str:
        return f"{self.left} {self.relation.value} {self.right}"
