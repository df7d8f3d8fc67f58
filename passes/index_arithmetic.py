"""Follows tensors that are made of positions and constants alone, such as attention masks.

What is found holds at any size and in any precision: positions are followed as integers only, in
types that hold any size.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._subclasses import FakeTensor

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    Mode,
    Op,
    Ref,
    StateKind,
    StateRef,
    ValueKind,
)
from gpipe_compiler.passes.coordinates import (
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
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.simplify import called

_POSITIONS = frozenset({torch.int32, torch.int64})
"""Types that hold positions in a tensor of any size."""

_LARGEST_TABLE = 2**24
"""Elements of a constant that is looked through."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What a tensor holds, and its shape at the graph's batch size."""

    element: Element
    shape: tuple[int, ...]


_Given = Sequence[Argument]


@dataclass
class Positions:
    """The values of an annotated graph whose elements follow from their coordinates."""

    graph: Graph
    effects: Effects
    _known: dict[str, _Held] = field(default_factory=dict)
    _states: dict[str, _Held | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.graph.ops:
            element = self._element(op)
            if element is not None and isinstance(op.result, str):
                self._known[op.result] = _Held(element, self.graph.values[op.result].shape)

    def element(self, argument: Argument) -> Element | None:
        """What a value or state holds; None where that is not known."""
        try:
            return self._held(argument).element
        except UnknownError:
            return None

    def __contains__(self, value: str) -> bool:
        return value in self._known

    def _element(self, op: Op) -> Element | None:
        call = op.call
        if not isinstance(call, FunctionCall | MethodCall) or op.mode is not Mode.ALWAYS:
            return None
        rule = _RULES.get(called(call))
        if rule is None or not isinstance(op.result, str):
            return None
        value = self.graph.values[op.result]
        written = not self.effects.alias_set(op.result).isdisjoint(self.effects.written_values)
        if value.kind is not ValueKind.TENSOR or value.dtype is None or written:
            return None
        try:
            found = rule(_Reading(self, value.shape), call.args, call.kwargs)
            return _settled(found, value.dtype, len(value.shape))
        except (UnknownError, IndexError, OverflowError):
            return None

    def _held(self, argument: Argument) -> _Held:
        if isinstance(argument, Ref) and argument.name in self._known:
            return self._known[argument.name]
        if isinstance(argument, StateRef):
            if argument.name not in self._states:
                self._states[argument.name] = self._constant(argument.name)
            held = self._states[argument.name]
            if held is not None:
                return held
        raise UnknownError

    def _constant(self, name: str) -> _Held | None:
        """What a tensor holds that nobody loads or writes."""
        state, tensor = self.graph.state[name], self.graph.tensors.get(name)
        fixed = state.kind is StateKind.CONSTANT or (
            state.kind is StateKind.BUFFER and not state.persistent
        )
        if not fixed or tensor is None or name in self.effects.written_states:
            return None
        if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.requires_grad:
            return None
        try:
            found = _settled(_looked_through(tensor), tensor.dtype, tensor.ndim)
        except UnknownError:
            return None
        return _Held(found, tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class _Reading:
    """The arguments of an op that makes a tensor of this shape."""

    positions: Positions
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def own(self, argument: Argument) -> _Held:
        """What an argument holds, in coordinates of its own."""
        return self.positions._held(argument)

    def wide(self, argument: Argument) -> Element:
        """What an argument holds at every coordinate of the result, which it is broadcast to."""
        if isinstance(argument, bool):
            return argument
        if isinstance(argument, int | float):
            return Cases(((True, number(argument, self.rank)),))
        held = self.own(argument)
        return moved(held.element, self.broadcast(held.shape), self.rank)

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


def _settled(element: Element, dtype: torch.dtype, rank: int) -> Element:
    """The element in a type.

    Raises:
        UnknownError: where the type may not hold it exactly.
    """
    if dtype is torch.bool:
        return as_condition(element)
    found = as_cases(element, rank)
    if dtype in _POSITIONS:
        if all(isinstance(affine.offset, int) for _, affine in found.cases):
            return found
    elif dtype.is_floating_point and all(affine.constant for _, affine in found.cases):
        rounded = [torch.tensor(a.offset, dtype=dtype).item() for _, a in found.cases]
        if not any(map(math.isnan, rounded)):
            pairs = zip(found.cases, rounded, strict=True)
            return Cases(tuple((when, number(value, rank)) for (when, _), value in pairs))
    raise UnknownError


def _looked_through(tensor: torch.Tensor) -> Element:
    """What a constant holds: one number, positions, or one number up to the diagonal."""
    rank = tensor.ndim
    if not 0 < tensor.numel() <= _LARGEST_TABLE:
        raise UnknownError
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        return Cases(((True, number(first.item(), rank)),))
    wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if len(wide) == 1 and tensor.dtype in _POSITIONS:
        if torch.equal(tensor.flatten().long(), torch.arange(tensor.numel())):
            return Cases(((True, coordinate(wide[0], rank)),))
    elif wide == [rank - 2, rank - 1]:
        lower = torch.ones(tensor.shape[-2:], dtype=torch.bool).tril()
        above = tensor[..., 0, 1].flatten()[0]
        if torch.equal(tensor, torch.where(lower, first, above).expand_as(tensor)):
            inside = _up_to(0, rank)
            outside = negated(inside)
            values = (inside, number(first.item(), rank)), (outside, number(above.item(), rank))
            return Cases(values)
    raise UnknownError


def _up_to(diagonal: int, rank: int) -> Condition:
    """The condition that the column is at most the row, plus so many."""
    if rank < 2:
        raise UnknownError
    left = coordinate(rank - 1, rank).plus(coordinate(rank - 2, rank), -1)
    return compared(left.plus(number(-diagonal, rank)), equal=False)


# --- rules ----------------------------------------------------------------------------------------

_Rule = Callable[[_Reading, _Given, Mapping[str, Argument]], Element]


def _given(
    names: str, args: _Given, kwargs: Mapping[str, Argument], **defaults: Argument
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


def _without_place(kwargs: Mapping[str, Argument]) -> dict[str, Argument]:
    """Keyword arguments that say what a new tensor holds; the result itself says its type."""
    return {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "requires_grad")}


def _arange(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    if _without_place(kwargs) or not 1 <= len(args) <= 3:
        raise UnknownError
    start = 0 if len(args) == 1 else args[0]
    step = args[2] if len(args) == 3 else 1
    if type(start) is not int or type(step) is not int:
        raise UnknownError
    return Cases(((True, coordinate(0, 1).scaled(step).plus(number(start, 1))),))


def _filled(value: float | None) -> _Rule:
    """A new tensor of one number; None for one that is given after the size."""

    def rule(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
        given = args[-1] if args else kwargs.get("fill_value")
        found = given if value is None else value
        if not isinstance(found, int | float):
            raise UnknownError
        return Cases(((True, number(found, reading.rank)),))

    return rule


def _same(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    """The tensor itself, perhaps in another type or with more dimensions before its own."""
    return reading.wide(args[0])


def _reshape(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    """Dimensions of size 1 come and go; the batch is never one of them."""
    name, held = args[0], reading.own(args[0])
    if not isinstance(name, Ref) or any(isinstance(item, torch.dtype) for item in args):
        raise UnknownError
    graph = reading.positions.graph
    if graph.values[name.name].batch_dim is not None:
        raise UnknownError
    before = [dim for dim, size in enumerate(held.shape) if size != 1]
    after = [dim for dim, size in enumerate(reading.shape) if size != 1]
    if [held.shape[dim] for dim in before] != [reading.shape[dim] for dim in after]:
        raise UnknownError
    places = [number(0, reading.rank)] * len(held.shape)
    for old, new in zip(before, after, strict=True):
        places[old] = coordinate(new, reading.rank)
    return moved(held.element, places, reading.rank)


def _unsqueeze(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    tensor, dim = _given("self dim", args, kwargs)
    new = dim % reading.rank
    places = [coordinate(d, reading.rank) for d in range(reading.rank) if d != new]
    return moved(reading.own(tensor).element, places, reading.rank)


def _permuted(order: Callable[[list[int], _Given], Sequence[int]]) -> _Rule:
    def rule(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
        if kwargs:
            raise UnknownError
        places = [number(0, reading.rank)] * reading.rank
        for new, old in enumerate(order(list(range(reading.rank)), args[1:])):
            places[old] = coordinate(new, reading.rank)
        return moved(reading.own(args[0]).element, places, reading.rank)

    return rule


def _swapped(dims: list[int], given: _Given) -> list[int]:
    first, second = given or (0, 1)
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _in_order(dims: list[int], given: _Given) -> list[int]:
    order = given[0] if isinstance(given[0], tuple | list) else given
    return [dims[dim] for dim in order]


def _item(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    held, index = reading.own(args[0]), args[1]
    entries = list(index) if isinstance(index, tuple) else [index]
    if entries and all(isinstance(entry, Ref) for entry in entries):
        return _gathered(reading, held, entries)
    taken = sum(entry is not None and entry is not ... for entry in entries)
    rest = [slice(None)] * (len(held.shape) - taken)
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
    return moved(held.element, places, reading.rank)


def _is_natural(number: Argument) -> bool:
    return type(number) is int and number >= 0


def _gathered(reading: _Reading, held: _Held, indices: Sequence[Argument]) -> Element:
    """Advanced indexing of the first dimensions: the index comes first, then what is left."""
    left = len(held.shape) - len(indices)
    front = _Reading(reading.positions, reading.shape[: reading.rank - left])
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
    return moved(held.element, places, reading.rank)


def _diff(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    """Differences of positions, also of a row that begins with the one before the first."""
    tensor, times, dim, before, after = _given(
        "input n dim prepend append", args, kwargs, n=1, dim=-1, prepend=None, append=None
    )
    held = reading.own(tensor)
    if times != 1 or after is not None:
        raise UnknownError
    rank = len(held.shape)
    row = as_cases(held.element, rank).only
    dim %= rank
    if before is not None:
        first = reading.own(before)
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


def _is_fixed(reading: _Reading, argument: Argument, dim: int) -> bool:
    """Whether a dimension is of one size at any batch."""
    return isinstance(argument, Ref) and (
        reading.positions.graph.values[argument.name].batch_dim != dim
    )


def _cumsum(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    tensor, dim = _given("self dim", args, kwargs)
    rank = reading.rank
    each = as_cases(reading.own(tensor).element, rank).only
    if not each.constant or not isinstance(each.offset, int):
        raise UnknownError
    place = coordinate(dim % rank, rank).plus(number(1, rank))
    return Cases(((True, place.scaled(each.offset)),))


def _pairs(
    reading: _Reading, one: Argument, other: Argument
) -> list[tuple[Condition, Affine, Affine]]:
    """Two operands case by case."""
    rank = reading.rank
    cases = itertools.product(
        as_cases(reading.wide(one), rank).cases, as_cases(reading.wide(other), rank).cases
    )
    found = [(every(a, b), left, right) for (a, left), (b, right) in cases]
    return [case for case in found if case[0] is not False]


def _arithmetic(function: Callable[[Affine, Affine], Affine]) -> _Rule:
    def rule(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
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


def _comparison(name: str) -> _Rule:
    def rule(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
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
    less, more = left.plus(right, -1), right.plus(left, -1)
    match name:
        case "le":
            return compared(less, equal=False)
        case "ge":
            return compared(more, equal=False)
        case "lt":
            return negated(compared(more, equal=False))
        case "gt":
            return negated(compared(less, equal=False))
        case "eq":
            return compared(less, equal=True)
        case _:
            return negated(compared(less, equal=True))


def _logic(join: Callable[..., Condition], *, of_bools: bool) -> _Rule:
    """`&` and the like, which are others of integers; `logical_and` and the like are not."""

    def rule(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
        parts = [reading.wide(argument) for argument in args]
        if kwargs or (of_bools and any(isinstance(part, Cases) for part in parts)):
            raise UnknownError
        return join(*map(as_condition, parts))

    return rule


def _chosen(reading: _Reading, condition: Condition, yes: Argument, no: Argument) -> Element:
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


def _where(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    condition, yes, no = _given("condition self other", args, kwargs)
    return _chosen(reading, as_condition(reading.wide(condition)), yes, no)


def _masked_fill(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
    tensor, mask, value = _given("self mask value", args, kwargs)
    return _chosen(reading, as_condition(reading.wide(mask)), value, tensor)


def _triangle(*, lower: bool) -> _Rule:
    def rule(reading: _Reading, args: _Given, kwargs: Mapping[str, Argument]) -> Element:
        tensor, diagonal = _given("self diagonal", args, kwargs, diagonal=0)
        if type(diagonal) is not int:
            raise UnknownError
        inside = (
            _up_to(diagonal, reading.rank) if lower else negated(_up_to(diagonal - 1, reading.rank))
        )
        return _chosen(reading, inside, tensor, 0)

    return rule


_LOGIC: Mapping[str, tuple[Callable[..., Condition], bool]] = {
    **dict.fromkeys(("and_", "__and__", "bitwise_and"), (every, True)),
    **dict.fromkeys(("or_", "__or__", "bitwise_or"), (some, True)),
    **dict.fromkeys(("invert", "inv", "__invert__", "bitwise_not"), (negated, True)),
    "logical_and": (every, False),
    "logical_or": (some, False),
    "logical_not": (negated, False),
}

_RULES: Mapping[str, _Rule] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(0)),
    **dict.fromkeys(("full", "new_full", "full_like", "tensor"), _filled(None)),
    **dict.fromkeys(("contiguous", "clone", "detach", "to", "type", "float", "long"), _same),
    **dict.fromkeys(("int", "bool", "expand", "expand_as", "broadcast_to"), _same),
    **dict.fromkeys(("view", "reshape"), _reshape),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("transpose", "t"), _permuted(_swapped)),
    "permute": _permuted(_in_order),
    "getitem": _item,
    "diff": _diff,
    "cumsum": _cumsum,
    "add": _arithmetic(Affine.plus),
    "sub": _arithmetic(lambda left, right: left.plus(right, -1)),
    "mul": _arithmetic(_product),
    **{name: _comparison(name) for name in ("le", "lt", "ge", "gt", "eq", "ne")},
    **{name: _logic(join, of_bools=of_bools) for name, (join, of_bools) in _LOGIC.items()},
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
}
"""By the name of the method or function."""
