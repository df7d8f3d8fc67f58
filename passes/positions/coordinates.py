"""Elements of a tensor as functions of their coordinates: affine numbers, and conditions on them.

Coordinates are integers from 0 on; how far they go is not known, so what holds here holds at any
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpipe_compiler.ir import Argument, Graph
from gpipe_compiler.runtime.sizes import Dim, Shape

_MOST_CASES = 16
"""Of an element; what takes more is given up."""


class UnknownError(Exception):
    """The element does not follow from the coordinates in a way that can be said here."""


@dataclass(frozen=True, slots=True)
class Affine:
    """`offset`, plus for every dimension its weight times the coordinate."""

    weights: tuple[int, ...]
    offset: float = 0

    @property
    def constant(self) -> bool:
        return not any(self.weights)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """The sum of this and `times` another."""
        weights = tuple(a + times * b for a, b in zip(self.weights, other.weights, strict=True))
        return Affine(weights, self.offset + times * other.offset)

    def scaled(self, factor: float) -> Affine:
        """A multiple of it.

        Raises:
            UnknownError: where the multiple of a coordinate is no integer.
        """
        if self.constant:
            return Affine(self.weights, self.offset * factor)
        if not isinstance(factor, int) or not isinstance(self.offset, int):
            raise UnknownError
        return Affine(tuple(factor * weight for weight in self.weights), factor * self.offset)

    def at(self, places: Sequence[Affine], rank: int) -> Affine:
        """The same with other coordinates: `places` are the own ones in terms of them."""
        found = number(self.offset, rank)
        for weight, place in zip(self.weights, places, strict=True):
            found = found.plus(place, weight) if weight else found
        return found


@dataclass(frozen=True, slots=True)
class Compared:
    """`left <= 0`, or `left == 0` where `equal`. Made by `compared`."""

    left: Affine
    equal: bool


@dataclass(frozen=True, slots=True)
class Every:
    """A conjunction. Made by `every`."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Negated:
    """A negation. Made by `negated`."""

    part: Condition


Condition: TypeAlias = bool | Compared | Every | Negated


@dataclass(frozen=True, slots=True)
class Cases:
    """The number of the one condition that is true."""

    cases: tuple[tuple[Condition, Affine], ...]

    def __post_init__(self) -> None:
        if len(self.cases) > _MOST_CASES:
            raise UnknownError

    @property
    def only(self) -> Affine:
        """The number where there is one case.

        Raises:
            UnknownError: where there are several.
        """
        (_, affine), *others = self.cases
        if others:
            raise UnknownError
        return affine


Element: TypeAlias = Condition | Cases


def number(value: float, rank: int) -> Affine:
    return Affine((0,) * rank, value)


def coordinate(dim: int, rank: int) -> Affine:
    return Affine(tuple(int(index == dim) for index in range(rank)))


def compared(left: Affine, *, equal: bool) -> Condition:
    """The condition that a number is at most 0, or 0: True or False where it always or never is."""
    low, high = min(left.weights, default=0), max(left.weights, default=0)
    if left.constant:
        return left.offset == 0 if equal else left.offset <= 0
    if low >= 0 and left.offset > 0:
        return False
    if high <= 0 and (left.offset < 0 if equal else left.offset <= 0):
        return not equal
    return Compared(left, equal)


def every(*parts: Condition) -> Condition:
    left = tuple(dict.fromkeys(part for part in parts if part is not True))
    if False in left:
        return False
    return Every(left) if len(left) > 1 else left[0] if left else True


def negated(part: Condition) -> Condition:
    if isinstance(part, bool):
        return not part
    return part.part if isinstance(part, Negated) else Negated(part)


def some(*parts: Condition) -> Condition:
    return negated(every(*map(negated, parts)))


def distances(condition: Condition, rank: int, length: int | None = None) -> dict[int, bool]:
    """Whether it holds by how far the coordinate before the last is ahead of the last one.

    Of the distances, one between any two at which a comparison changes. Only for conditions on that
    distance: {} for any other.

    Args:
        length: of both dimensions, where that is fixed; what holds, holds at any size without it.
    """
    try:
        parts = list(_comparisons(condition, rank))
    except UnknownError:
        return {}
    # Between the distances at which a comparison changes, the condition is the same.
    turns = [math.floor(-offset / slope) for slope, offset in parts] or [0]
    tried = {-1, 0, min(turns) - 2, max(turns) + 3}
    tried.update(turn + step for turn in turns for step in (-1, 0, 1, 2))
    if length is not None:
        tried = {distance for distance in tried if abs(distance) < length}
        tried.update((length - 1, 1 - length))
    return {distance: _holds(condition, distance) for distance in tried}


def is_causal(held: Mapping[int, bool]) -> bool:
    """Whether a query sees the keys up to its own, by `distances`."""
    return bool(held) and all(seen == (distance >= 0) for distance, seen in held.items())


def _comparisons(condition: Condition, rank: int) -> Iterator[tuple[int, int]]:
    """Slope and offset of every comparison, in terms of query less key."""
    match condition:
        case Compared(left=left):
            *others, query, key = left.weights
            if any(others) or query != -key or rank < 2 or not isinstance(left.offset, int):
                raise UnknownError
            yield query, left.offset
        case Every(parts=parts):
            for part in parts:
                yield from _comparisons(part, rank)
        case Negated(part=part):
            yield from _comparisons(part, rank)


def _holds(condition: Condition, distance: int) -> bool:
    match condition:
        case Compared(left=left, equal=equal):
            value = left.weights[-2] * distance + left.offset
            return value == 0 if equal else value <= 0
        case Every(parts=parts):
            return all(_holds(part, distance) for part in parts)
        case Negated(part=part):
            return not _holds(part, distance)
        case bool():
            return condition


# --- elements of tensors, and how rules read their arguments --------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """The elements of a tensor, and its shape at the graph's batch size."""

    element: Element
    shape: Shape


Given = Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the arguments of an op hold that makes a tensor of this shape.

    Attributes:
        content: the elements of a value or state; raises UnknownError where they are not known.
    """

    graph: Graph
    content: Callable[[Argument], Content]
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    def wide(self, argument: Argument) -> Element:
        """The elements of an argument that is broadcast to the result, in coordinates of that."""
        if isinstance(argument, bool):
            return argument
        if isinstance(argument, int | float):
            return Cases(((True, number(argument, self.rank)),))
        content = self.content(argument)
        return moved(content.element, self.broadcast(content.shape), self.rank)

    def broadcast(self, shape: Sequence[Dim]) -> list[Affine]:
        """The coordinates in a tensor that is broadcast to the result."""
        first = self.rank - len(shape)
        if first < 0:
            raise UnknownError
        places = []
        for dim, size in enumerate(shape):
            same = size == self.shape[first + dim]
            if not same and size != 1:
                raise UnknownError
            places.append(coordinate(first + dim, self.rank) if same else number(0, self.rank))
        return places


Rule = Callable[[Reading, Given, Mapping[str, Argument]], Element]


def moved(element: Element, places: Sequence[Affine], rank: int) -> Element:
    """An element with other coordinates, as `Affine.at`."""
    if not isinstance(element, Cases):
        return _moved_condition(element, places, rank)
    cases = (
        (_moved_condition(when, places, rank), a.at(places, rank)) for when, a in element.cases
    )
    return Cases(tuple(cases))


def _moved_condition(condition: Condition, places: Sequence[Affine], rank: int) -> Condition:
    match condition:
        case Compared(left=left, equal=equal):
            return compared(left.at(places, rank), equal=equal)
        case Every(parts=parts):
            return every(*(_moved_condition(part, places, rank) for part in parts))
        case Negated(part=part):
            return negated(_moved_condition(part, places, rank))
    return condition


def as_cases(element: Element, rank: int) -> Cases:
    """A condition as 1 and 0; numbers as they are."""
    if isinstance(element, Cases):
        return element
    cases = ((element, number(1, rank)), (negated(element), number(0, rank)))
    return Cases(tuple(case for case in cases if case[0] is not False))


def as_condition(element: Element) -> Condition:
    """The condition that a number is not 0."""
    if not isinstance(element, Cases):
        return element
    return negated(some(*(every(when, compared(a, equal=True)) for when, a in element.cases)))


def up_to(diagonal: int, rank: int) -> Condition:
    """The condition that the column is at most the row plus `diagonal`."""
    if rank < 2:
        raise UnknownError
    left = coordinate(rank - 1, rank).plus(coordinate(rank - 2, rank), -1)
    return compared(left.plus(number(-diagonal, rank)), equal=False)


def arguments(
    names: str, args: Given, kwargs: Mapping[str, Argument], **defaults: Argument
) -> list[Argument]:
    """Arguments in order, by position or name.

    Raises:
        UnknownError: for an argument of another name, or none where one is needed.
    """
    order = names.split()
    found = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
    if len(args) > len(order) or found.keys() != set(order):
        raise UnknownError
    return [found[name] for name in order]
