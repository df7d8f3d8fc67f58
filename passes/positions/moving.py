"""Rules of ops that move the elements of a tensor: views, indices, casts and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gpipe_compiler.ir import Argument, Ref
from gpipe_compiler.passes.positions.coordinates import (
    Affine,
    Cases,
    Element,
    UnknownError,
    coordinate,
    number,
)
from gpipe_compiler.passes.positions.elements import Content, Given, Reading, Rule, arguments, moved


def _same(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    """The tensor itself, perhaps in another type or with more dimensions before its own."""
    return reading.wide(args[0])


def _reshape(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    """Dimensions of size 1 come and go; the batch is never one of them."""
    name, content = args[0], reading.own(args[0])
    if not isinstance(name, Ref) or any(isinstance(item, torch.dtype) for item in args):
        raise UnknownError
    graph = reading.graph
    if graph.values[name.name].batch_dim is not None:
        raise UnknownError
    before = [dim for dim, size in enumerate(content.shape) if size != 1]
    after = [dim for dim, size in enumerate(reading.shape) if size != 1]
    if [content.shape[dim] for dim in before] != [reading.shape[dim] for dim in after]:
        raise UnknownError
    places = [number(0, reading.rank)] * len(content.shape)
    for old, new in zip(before, after, strict=True):
        places[old] = coordinate(new, reading.rank)
    return moved(content.element, places, reading.rank)


def _unsqueeze(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    tensor, dim = arguments("self dim", args, kwargs)
    new = dim % reading.rank
    places = [coordinate(d, reading.rank) for d in range(reading.rank) if d != new]
    return moved(reading.own(tensor).element, places, reading.rank)


def _permuted(order: Callable[[list[int], Given], Sequence[int]]) -> Rule:
    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        if kwargs:
            raise UnknownError
        places = [number(0, reading.rank)] * reading.rank
        for new, old in enumerate(order(list(range(reading.rank)), args[1:])):
            places[old] = coordinate(new, reading.rank)
        return moved(reading.own(args[0]).element, places, reading.rank)

    return rule


def _swapped(dims: list[int], given: Given) -> list[int]:
    first, second = given or (0, 1)
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _in_order(dims: list[int], given: Given) -> list[int]:
    order = given[0] if isinstance(given[0], tuple | list) else given
    return [dims[dim] for dim in order]


def _item(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    content, index = reading.own(args[0]), args[1]
    entries = list(index) if isinstance(index, tuple) else [index]
    if entries and all(isinstance(entry, Ref) for entry in entries):
        return _gathered(reading, content, entries)
    taken = sum(entry is not None and entry is not ... for entry in entries)
    rest = [slice(None)] * (len(content.shape) - taken)
    if ... in entries:
        place = entries.index(...)
        entries[place : place + 1] = rest
    else:
        entries += rest
    places: list[Affine] = []
    new = 0
    for entry in entries:
        if entry is None:
            new += 1
        elif isinstance(entry, slice):
            start, step = entry.start or 0, entry.step or 1
            if not _is_natural(start) or not _is_natural(step):
                raise UnknownError
            row = coordinate(new, reading.rank).scaled(step)
            places.append(row.plus(number(start, reading.rank)))
            new += 1
        elif _is_natural(entry):
            places.append(number(entry, reading.rank))
        else:
            raise UnknownError
    return moved(content.element, places, reading.rank)


def _is_natural(number: Argument) -> bool:
    return type(number) is int and number >= 0


def _gathered(reading: Reading, content: Content, indices: Sequence[Argument]) -> Element:
    """Advanced indexing of the first dimensions: the index comes first, then what is left."""
    left = len(content.shape) - len(indices)
    front = Reading(reading.graph, reading.content, reading.shape[: reading.rank - left])
    places: list[Affine] = []
    for index in indices:
        element = front.wide(index)
        if not isinstance(element, Cases):
            raise UnknownError
        place = element.only
        if min(place.weights, default=0) < 0 or place.offset < 0:  # counts from the end
            raise UnknownError
        places.append(Affine((*place.weights, *(0,) * left), place.offset))
    places += [coordinate(front.rank + dim, reading.rank) for dim in range(left)]
    return moved(content.element, places, reading.rank)


MOVING: Mapping[str, Rule] = {
    **dict.fromkeys(("contiguous", "clone", "detach", "to", "type", "float", "long"), _same),
    **dict.fromkeys(("int", "bool", "expand", "expand_as", "broadcast_to"), _same),
    **dict.fromkeys(("view", "reshape"), _reshape),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("transpose", "t"), _permuted(_swapped)),
    "permute": _permuted(_in_order),
    "getitem": _item,
}
"""By the name of the method or function."""
