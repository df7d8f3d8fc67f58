"""Nests of tensors: taking them apart into a flat list, and putting them together again."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gpipe_compiler.ir.arguments import leaves, map_argument
from gpipe_compiler.runtime.core.nest import (
    Path,
    cache_fields,
    fields_with_tensors,
)
from gpipe_compiler.runtime.core.outputs import of_class
from gpipe_compiler.runtime.spec import OutputClass, Unreturned

Template: TypeAlias = Any
"""Tuples, lists and dicts (nested) of `TensorSlot` and constants."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of a tensor: its number in the flat list."""

    index: int


def with_tensors(tree: object, tensors: Iterator[object]) -> object:
    """The same nest with others in place of its tensors, in order."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, tuple | list | Mapping) or fields_with_tensors(tree) is not None:
        return _rebuilt(tree, lambda _, item: with_tensors(item, tensors))
    return tree


def with_item(tree: object, path: Path, item: object) -> object:
    """The same nest with another item at a path."""
    if not path:
        return item
    first, *rest = path
    return _rebuilt(
        tree, lambda key, held: with_item(held, tuple(rest), item) if key == first else held
    )


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: object) -> object:
    """The same nest with every tensor changed.

    Objects of the model's own output classes are copied, so that their attributes work as before.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    return _rebuilt(tree, lambda _, item: map_tensors(change, item))


def _rebuilt(tree: object, change: Callable[[str | int, object], object]) -> object:
    """A container of the same class with every item changed; anything else as it is."""
    if isinstance(tree, tuple | list):
        items = [change(index, item) for index, item in enumerate(tree)]
        if isinstance(tree, tuple) and hasattr(tree, "_make"):
            return tree._make(items)
        return of_class(type(tree), items if isinstance(tree, list) else tuple(items))
    fields = _fields(tree)
    if fields is None:
        return tree
    changed = {key: change(key, item) for key, item in fields.items()}
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return changed
    twin = copy.copy(tree)
    if cache_fields(tree) is not None:  # which a model writes to, in what it holds beside tensors
        vars(twin).update({k: dict(v) for k, v in vars(tree).items() if isinstance(v, dict)})
    for key, item in changed.items():
        if isinstance(twin, MutableMapping):
            twin[key] = item
        else:
            object.__setattr__(twin, key, item)
    return twin


def describe(output: object, *, trains: bool = False) -> Template:
    """The structure of what a model returns.

    Named tuples become tuples. A dict subclass or dataclass becomes a dict of its fields that are
    not None. In the place of anything that is no tensor, container or constant stands an
    `Unreturned`.

    Args:
        trains: whether the model is trained: caches are for what is generated later, and many
            return them in eval mode alone: they are then handed out in neither mode.
    """
    numbers = itertools.count()

    def walk(item: object, path: Path) -> Template:
        if isinstance(item, torch.Tensor):
            return TensorSlot(next(numbers))
        if isinstance(item, tuple | list):
            items = [walk(part, (*path, index)) for index, part in enumerate(item)]
            return items if isinstance(item, list) else tuple(items)
        fields = None if trains and cache_fields(item) is not None else _fields(item)
        if fields is not None:
            return {key: walk(value, (*path, key)) for key, value in fields.items()}
        if item is None or isinstance(item, bool | int | float | complex | str | torch.dtype):
            return item
        return Unreturned(path, type(item).__name__)

    return walk(output, ())


def classes_in(output: object, path: Path = ()) -> Iterator[OutputClass]:
    """The classes of the model's own in what it returns; see `describe`."""
    if isinstance(output, torch.Tensor):
        return
    cls, fields = type(output), _fields(output)
    named = tuple(getattr(output, "_fields", ())) if hasattr(output, "_make") else ()
    holds = fields is not None or isinstance(output, tuple | list)
    if holds and cls not in (tuple, list, dict):
        factory = output.default_factory if isinstance(output, collections.defaultdict) else None
        where = (getattr(factory, "__module__", ""), getattr(factory, "__qualname__", ""))
        made_by = where if factory is not None else ()
        yield OutputClass(path, cls.__module__, cls.__qualname__, named, made_by)
    if isinstance(output, tuple | list):
        fields = dict(enumerate(output))
    for key, item in (fields or {}).items():
        if key != "layers" or cache_fields(output) is None:  # which a cache makes by itself
            yield from classes_in(item, (*path, key))


def _fields(item: object) -> dict[Any, object] | None:
    """What a dict, a dataclass, a namespace or a cache holds, None for anything else."""
    cache = cache_fields(item)
    if cache is not None:
        return cache
    if type(item) is types.SimpleNamespace:
        return dict(vars(item))
    if isinstance(item, Mapping):
        plain = not dataclasses.is_dataclass(item)
        return {key: value for key, value in item.items() if plain or value is not None}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        pairs = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        return {key: value for key, value in pairs.items() if value is not None}
    return None


def pick(output: Any, template: Template) -> list[Any]:
    """What stands at the slots of a template, in order.

    While a model is traced, the output may hold the tracer's stand-ins instead of tensors and
    tuples, so that only the template knows the structure.
    """
    if isinstance(template, TensorSlot):
        return [output]
    if isinstance(template, tuple | list):
        return [
            leaf
            for index, item in enumerate(template)
            if has_slots(item)
            for leaf in pick(output[index], item)
        ]
    if isinstance(template, dict):
        by_key = isinstance(output, Mapping)
        return [
            leaf
            for key, item in template.items()
            if has_slots(item)
            for leaf in pick(output[key] if by_key else getattr(output, key), item)
        ]
    return []


def has_slots(template: Template) -> bool:
    """Whether a tensor stands anywhere in it."""
    return bool(slots(template))


def slots(template: Template) -> list[int]:
    """The numbers of its slots, in order."""
    return [leaf.index for leaf in leaves(template) if isinstance(leaf, TensorSlot)]


def fill(template: Template, given: Sequence[Any]) -> Any:
    """The template with the item of that number at every slot."""
    return map_argument(
        lambda leaf: given[leaf.index] if isinstance(leaf, TensorSlot) else leaf, template
    )
