"""What may stand as an argument of a call in the graph, and how to walk over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch.utils._pytree import tree_leaves


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


@dataclass(frozen=True, slots=True)
class BatchMultiple:
    """An integer: `factor` times the samples of the micro-batch.

    A stage reads it off any tensor it has: for a value `v` with a batch dimension `d`, and
    `c = v.shape[d] // graph.batch_size`, it is `t.size(d) * factor // c` (`t.size(d)` when the two
    are equal, as they nearly always are).
    """

    factor: int


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
            return slice(*(map_argument(function, item) for item in (start, stop, step)))
        case _:
            return function(argument)


def parts(argument: Argument) -> Iterable[Argument] | None:
    """What a container holds, in order; None for a leaf."""
    if isinstance(argument, (tuple, list)):
        return argument
    if isinstance(argument, dict):
        return argument.values()
    if isinstance(argument, ByMode):
        return argument.train, argument.evaluation
    if isinstance(argument, slice):
        return argument.start, argument.stop, argument.step
    return None


def at_place(argument: Argument, place: Sequence[str | int]) -> Any:
    """What stands at a place of nested tuples, lists and dicts."""
    for key in place:
        argument = argument[key]
    return argument


def leaves(argument: Argument) -> Iterator[Leaf]:
    """Every leaf of an argument, in order; both sides of a `ByMode`."""
    found: list[Leaf] = []
    _gather(argument, found)
    return iter(found)


def _gather(argument: Argument, found: list[Leaf]) -> None:
    """Adds the leaves of an argument: all passes ask, so the most frequent kinds come first."""
    kind = type(argument)
    inside = None if kind is Ref or kind is StateRef else parts(argument)
    if inside is None:
        found.append(argument)
    else:
        for item in inside:
            _gather(item, found)


def renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    """The argument, reading other values instead of some.

    Args:
        names: the values that are read, by those that were.
    """

    def leaf(item: Leaf) -> Argument:
        return Ref(names.get(item.name, item.name)) if isinstance(item, Ref) else item

    return map_argument(leaf, argument)


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
    if isinstance(argument, ByMode):
        yield argument
    else:
        for item in parts(argument) or ():
            yield from choices(item)


def in_mode(argument: Argument, *, training: bool) -> Argument:
    """The argument of one mode, without choices."""
    match argument:
        case ByMode(train=train, evaluation=evaluation):
            return in_mode(train if training else evaluation, training=training)
        case tuple() | list():
            return type(argument)(in_mode(item, training=training) for item in argument)
        case dict():
            return {key: in_mode(item, training=training) for key, item in argument.items()}
        case slice(start=start, stop=stop, step=step):
            return slice(*(in_mode(item, training=training) for item in (start, stop, step)))
        case _:
            return argument


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors that share memory, as long as one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


def has_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient comes back through a tensor: through no view that is taken without
    gradients, though torch says that it requires one as what it views does."""
    base = tensor._base
    if not tensor.requires_grad or base is None or not base.requires_grad:
        return tensor.requires_grad
    return _get_creation_meta(tensor) != CreationMeta.NO_GRAD_MODE


def tensors_in(item: object) -> list[torch.Tensor]:
    """Every tensor in a nest of tuples, lists, dicts, slices, and what else torch knows the leaves
    of."""
    if isinstance(item, torch.Tensor):
        return [item]
    if item is None or isinstance(item, int | float | str):
        return []
    if type(item) is dict:
        item = list(item.values())
    if isinstance(item, slice):
        item = [item.start, item.stop, item.step]
    if type(item) in (tuple, list):
        return [tensor for part in item for tensor in tensors_in(part)]  # type: ignore[attr-defined]  # of a sequence
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)]
