"""What may stand as an argument of a call in the graph, and how to walk over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of this name, made by an earlier op or given as an input of the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class StateRef:
    """The parameter, buffer or constant of this (original, canonical) name."""

    name: str


@dataclass(frozen=True, slots=True)
class ByMode:
    """One argument in train mode, another in eval mode.

    `ByMode(True, False)` is the module's own `self.training`.
    """

    train: Argument
    evaluation: Argument


Argument: TypeAlias = Any
"""A `Ref`, `StateRef` or `ByMode`; a constant (None, bool, int, float, complex, str, torch.dtype,
torch.device, torch.layout, torch.memory_format, Ellipsis); or a tuple, list, dict or slice of
arguments."""

Leaf: TypeAlias = Any


def map_argument(function: Callable[[Leaf], Argument], argument: Argument) -> Argument:
    """The same argument with `function` applied to every leaf (refs and constants).

    `ByMode` counts as a container: both of its sides are mapped. A choice between a value and
    itself is the value.
    """
    match argument:
        case ByMode(train=train, evaluation=evaluation):
            sides = map_argument(function, train), map_argument(function, evaluation)
            same = isinstance(sides[0], Ref) and sides[0] == sides[1]
            return sides[0] if same else ByMode(*sides)
        case tuple():
            return tuple(map_argument(function, item) for item in argument)
        case list():
            return [map_argument(function, item) for item in argument]
        case dict():
            return {key: map_argument(function, item) for key, item in argument.items()}
        case slice(start=start, stop=stop, step=step):
            return slice(
                map_argument(function, start),
                map_argument(function, stop),
                map_argument(function, step),
            )
        case _:
            return function(argument)


def leaves(argument: Argument) -> Iterator[Leaf]:
    """Every leaf of an argument, in order; both sides of a `ByMode`."""
    found: list[Leaf] = []
    _gather(argument, found)
    return iter(found)


def _gather(argument: Argument, found: list[Leaf]) -> None:
    """Adds the leaves of an argument: all passes ask, so the most frequent kinds come first."""
    kind = type(argument)
    if kind is Ref or kind is StateRef:
        found.append(argument)
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            _gather(item, found)
    elif isinstance(argument, dict):
        for item in argument.values():
            _gather(item, found)
    elif isinstance(argument, ByMode):
        _gather(argument.train, found)
        _gather(argument.evaluation, found)
    elif isinstance(argument, slice):
        for item in (argument.start, argument.stop, argument.step):
            _gather(item, found)
    else:
        found.append(argument)


def value_names(argument: Argument) -> Iterator[str]:
    """The names of the values that an argument reads."""
    for leaf in leaves(argument):
        if isinstance(leaf, Ref):
            yield leaf.name


def state_names(argument: Argument) -> Iterator[str]:
    """The names of the parameters, buffers and constants that an argument reads."""
    for leaf in leaves(argument):
        if isinstance(leaf, StateRef):
            yield leaf.name


def choices(argument: Argument) -> Iterator[ByMode]:
    """The choices between modes in an argument, the outermost ones."""
    match argument:
        case ByMode():
            yield argument
        case tuple() | list():
            for item in argument:
                yield from choices(item)
        case dict():
            for item in argument.values():
                yield from choices(item)
        case slice(start=start, stop=stop, step=step):
            for item in (start, stop, step):
                yield from choices(item)
