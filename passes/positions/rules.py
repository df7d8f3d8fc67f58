"""Rules of ops that make numbers and conditions of positions, and of those that move elements."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from gpipe_compiler.ir import Argument, Ref
from gpipe_compiler.passes.positions.coordinates import (
    Affine,
    Cases,
    Condition,
    Content,
    Element,
    Given,
    Reading,
    Rule,
    UnknownError,
    arguments,
    as_cases,
    as_condition,
    compared,
    coordinate,
    every,
    moved,
    negated,
    number,
    some,
    up_to,
)
from gpipe_compiler.passes.verbs import AND, NOT, OR


def _without_place(kwargs: Mapping[str, Argument]) -> dict[str, Argument]:
    """Keyword arguments that say what a new tensor holds; the result itself says its type."""
    return {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "requires_grad")}


def _arange(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    if _without_place(kwargs) or not 1 <= len(args) <= 3:
        raise UnknownError
    start = 0 if len(args) == 1 else args[0]
    step = args[2] if len(args) == 3 else 1
    if type(start) is not int or type(step) is not int:
        raise UnknownError
    return Cases(((True, coordinate(0, 1).scaled(step).plus(number(start, 1))),))


def _filled(value: float | None) -> Rule:
    """A new tensor of one number; None for one that is given after the size."""

    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        given = args[-1] if args else kwargs.get("fill_value")
        found = given if value is None else value
        if not isinstance(found, int | float):
            raise UnknownError
        return Cases(((True, number(found, reading.rank)),))

    return rule


def _diff(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    """Differences of positions, also of a row that begins with the one before the first."""
    tensor, times, dim, before, after = arguments(
        "input n dim prepend append", args, kwargs, n=1, dim=-1, prepend=None, append=None
    )
    content = reading.content(tensor)
    if times != 1 or after is not None:
        raise UnknownError
    rank = len(content.shape)
    row = as_cases(content.element, rank).only
    dim %= rank
    if before is not None:
        first = reading.content(before)
        if len(first.shape) != rank or first.shape[dim] != 1 or not _is_fixed(reading, before, dim):
            raise UnknownError
        places = [coordinate(d, rank) for d in range(rank)]
        places[dim] = number(-1, rank)
        given = as_cases(first.element, rank).only
        places_of_one = [coordinate(d, rank) for d in range(rank)]
        places_of_one[dim] = number(0, rank)
        if given.at(places_of_one, rank) != row.at(places, rank):
            raise UnknownError
    return Cases(((True, number(row.weights[dim], rank)),))


def _is_fixed(reading: Reading, argument: Argument, dim: int) -> bool:
    """Whether a dimension is of one size at any batch."""
    return isinstance(argument, Ref) and (reading.graph.values[argument.name].batch_dim != dim)


def _cumsum(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    tensor, dim = arguments("self dim", args, kwargs)
    rank = reading.rank
    each = as_cases(reading.content(tensor).element, rank).only
    if not each.constant or not isinstance(each.offset, int):
        raise UnknownError
    place = coordinate(dim % rank, rank).plus(number(1, rank))
    return Cases(((True, place.scaled(each.offset)),))


def _pairs(
    reading: Reading, one: Argument, other: Argument
) -> list[tuple[Condition, Affine, Affine]]:
    """Two operands case by case."""
    rank = reading.rank
    cases = itertools.product(
        as_cases(reading.wide(one), rank).cases, as_cases(reading.wide(other), rank).cases
    )
    found = [(every(a, b), left, right) for (a, left), (b, right) in cases]
    return [case for case in found if case[0] is not False]


def _arithmetic(function: Callable[[Affine, Affine], Affine]) -> Rule:
    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        if kwargs or len(args) != 2:
            raise UnknownError
        pairs = _pairs(reading, *args)
        return Cases(tuple((when, function(left, right)) for when, left, right in pairs))

    return rule


def _product(left: Affine, right: Affine) -> Affine:
    if left.constant:
        return right.scaled(left.offset)
    if right.constant:
        return left.scaled(right.offset)
    raise UnknownError


def _comparison(name: str) -> Rule:
    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        if kwargs or len(args) != 2:
            raise UnknownError
        pairs = _pairs(reading, *args)
        return some(*(every(when, _related(name, a, b)) for when, a, b in pairs))

    return rule


def _related(name: str, left: Affine, right: Affine) -> Condition:
    if left.constant and right.constant:
        return bool(getattr(operator, name)(left.offset, right.offset))
    if not isinstance(left.offset, int) or not isinstance(right.offset, int):
        raise UnknownError
    if name in ("ge", "lt"):
        left, right = right, left
    found = compared(left.plus(right, -1), equal=name in ("eq", "ne"))
    return negated(found) if name in ("lt", "gt", "ne") else found


def _logic(join: Callable[..., Condition], *, of_bools: bool) -> Rule:
    """`&` and the like, which are others of integers; `logical_and` and the like are not."""

    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        parts = [reading.wide(argument) for argument in args]
        if kwargs or (of_bools and any(isinstance(part, Cases) for part in parts)):
            raise UnknownError
        return join(*map(as_condition, parts))

    return rule


def _chosen(reading: Reading, condition: Condition, yes: Argument, no: Argument) -> Element:
    rank = reading.rank
    parts = (condition, reading.wide(yes)), (negated(condition), reading.wide(no))
    return Cases(
        tuple(
            (every(when, inner), affine)
            for when, element in parts
            for inner, affine in as_cases(element, rank).cases
            if every(when, inner) is not False
        )
    )


def _where(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    condition, yes, no = arguments("condition self other", args, kwargs)
    return _chosen(reading, as_condition(reading.wide(condition)), yes, no)


def _masked_fill(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    tensor, mask, value = arguments("self mask value", args, kwargs)
    return _chosen(reading, as_condition(reading.wide(mask)), value, tensor)


def _triangle(*, lower: bool) -> Rule:
    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        tensor, diagonal = arguments("self diagonal", args, kwargs, diagonal=0)
        if type(diagonal) is not int:
            raise UnknownError
        inside = (
            up_to(diagonal, reading.rank) if lower else negated(up_to(diagonal - 1, reading.rank))
        )
        return _chosen(reading, inside, tensor, 0)

    return rule


COMPUTING: Mapping[str, Rule] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(0)),
    **dict.fromkeys(("full", "new_full", "full_like", "tensor"), _filled(None)),
    "diff": _diff,
    "cumsum": _cumsum,
    "add": _arithmetic(Affine.plus),
    "sub": _arithmetic(lambda left, right: left.plus(right, -1)),
    "mul": _arithmetic(_product),
    **{name: _comparison(name) for name in ("le", "lt", "ge", "gt", "eq", "ne")},
    **{
        name: _logic(join, of_bools=not name.startswith("logical_"))
        for names, join in ((AND, every), (OR, some), (NOT, negated))
        for name in names
    },
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
}
"""By the name of the method or function."""


# --- ops that move elements -----------------------------------------------------------------------


def _same(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    """The tensor itself, perhaps in another type or with more dimensions before its own."""
    return reading.wide(args[0])


def _reshape(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    """Dimensions of size 1 come and go; the batch is never one of them."""
    name, content = args[0], reading.content(args[0])
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
    return moved(reading.content(tensor).element, places, reading.rank)


def _permuted(order: Callable[[list[int], Given], Sequence[int]]) -> Rule:
    def rule(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
        if kwargs:
            raise UnknownError
        places = [number(0, reading.rank)] * reading.rank
        for new, old in enumerate(order(list(range(reading.rank)), args[1:])):
            places[old] = coordinate(new, reading.rank)
        return moved(reading.content(args[0]).element, places, reading.rank)

    return rule


def _swapped(dims: list[int], given: Given) -> list[int]:
    first, second = given or (0, 1)
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _in_order(dims: list[int], given: Given) -> list[int]:
    order = given[0] if isinstance(given[0], tuple | list) else given
    return [dims[dim] for dim in order]


def _item(reading: Reading, args: Given, kwargs: Mapping[str, Argument]) -> Element:
    content, index = reading.content(args[0]), args[1]
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
