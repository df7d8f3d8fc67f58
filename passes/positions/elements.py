"""What tensors hold, and how the rules that follow it from op to op read their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.ir import Argument, Graph
from gpipe_compiler.passes.positions.coordinates import (
    Affine,
    Cases,
    Condition,
    Element,
    UnknownError,
    compared,
    condition_at,
    coordinate,
    every,
    negated,
    number,
    some,
)


@dataclass(frozen=True, slots=True)
class Content:
    """The elements of a tensor, and its shape at the graph's batch size."""

    element: Element
    shape: tuple[int, ...]


Given = Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the arguments of an op hold that makes a tensor of this shape.

    Attributes:
        content: the elements of a value or state; raises UnknownError where they are not known.
    """

    graph: Graph
    content: Callable[[Argument], Content]
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of dimensions of the result."""
        return len(self.shape)

    def own(self, argument: Argument) -> Content:
        """The elements of an argument, in coordinates of its own."""
        return self.content(argument)

    def wide(self, argument: Argument) -> Element:
        """The elements of an argument that is broadcast to the result, in coordinates of that."""
        if isinstance(argument, bool):
            return argument
        if isinstance(argument, int | float):
            return Cases(((True, number(argument, self.rank)),))
        content = self.own(argument)
        return moved(content.element, self.broadcast(content.shape), self.rank)

    def broadcast(self, shape: Sequence[int]) -> list[Affine]:
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
    """An element with other coordinates."""
    if isinstance(element, Cases):
        return element.at(places, rank)
    return condition_at(element, places, rank)


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
