"""Nests of tensors: tuples, lists and dicts in one another."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")

Path = tuple[str | int, ...]
"""The way to a tensor: a key or an index for every level."""


CACHES = "transformers.cache_utils"
"""The module of the caches."""

_HELD_BY: Mapping[str, tuple[str, ...]] = {
    "DynamicCache": ("layers",),
    "DynamicLayer": ("keys", "values"),
    "EncoderDecoderCache": ("self_attention_cache", "cross_attention_cache"),
}
"""The caches of transformers that hold nothing but tensors, each with what it holds them by."""


def cache_fields(item: object) -> dict[str, object] | None:
    """What a cache of transformers holds, or a layer of one; None for anything else."""
    cls = type(item)
    if cls.__module__ != CACHES or cls.__name__ not in _HELD_BY:
        return None
    pairs = {name: getattr(item, name, None) for name in _HELD_BY[cls.__name__]}
    return {name: held for name, held in pairs.items() if held is not None}


def tensors_of(nest: object, *, objects: bool = False) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor in a nest, with the way to it; see `items_of`."""
    return items_of(nest, torch.Tensor, objects=objects)


def items_of(nest: object, kind: type[T], *, objects: bool = False) -> Iterator[tuple[Path, T]]:
    """All of one type in a nest, with the way to each; see `leaves_of`."""
    for path, leaf in leaves_of(nest, objects=objects):
        if isinstance(leaf, kind):
            yield path, leaf


def leaves_of(
    nest: object, path: Path = (), *, objects: bool = False
) -> Iterator[tuple[Path, object]]:
    """What stands in a nest of tuples, lists, dicts and caches, with the way to each.

    Args:
        objects: whether to look into dataclasses and namespaces too, by the names of their fields.
    """
    cache = cache_fields(nest)
    if cache is not None:
        held: Iterable[tuple[str | int, object]] = cache.items()
    elif isinstance(nest, tuple | list):
        held = enumerate(nest)
    elif isinstance(nest, Mapping):
        held = nest.items()
    elif objects and dataclasses.is_dataclass(nest):
        held = ((field.name, getattr(nest, field.name)) for field in dataclasses.fields(nest))
    elif objects and isinstance(nest, types.SimpleNamespace):
        held = vars(nest).items()
    else:
        yield path, nest
        return
    for key, item in held:
        yield from leaves_of(item, (*path, key), objects=objects)
