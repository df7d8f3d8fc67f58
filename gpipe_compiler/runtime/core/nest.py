"""Nests of tensors: tuples, lists and dicts in one another."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Path = tuple[str | int, ...]
"""The way to a tensor: a key or an index for every level."""


CACHES = "transformers.cache_utils"
"""The module of the caches."""

_ATTENTION, _LINEAR = ("keys", "values"), ("conv_states", "recurrent_states")

CACHE_LAYERS: Mapping[str, tuple[str, ...]] = {
    "DynamicLayer": _ATTENTION,
    "LinearAttentionLayer": _LINEAR,
    "LinearAttentionAndFullAttentionLayer": (*_ATTENTION, *_LINEAR),
}
"""The layers of such a cache: of keys and values, of what state-space models remember, of both."""

_HELD_BY: Mapping[str, tuple[str, ...]] = {
    "DynamicCache": ("layers",),
    "EncoderDecoderCache": ("self_attention_cache", "cross_attention_cache"),
    **CACHE_LAYERS,
}
"""The caches of transformers that may hold tensors alone, each with what it holds them by."""


def fields_with_tensors(item: object) -> dict[str, object] | None:
    """What a cache holds, or a dataclass with tensors in it; None for anything else."""
    cache = cache_fields(item)
    if cache is not None or not dataclasses.is_dataclass(item) or isinstance(item, type):
        return cache
    held = _fields(item)
    found = any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_of(held, objects=True))
    return held if found else None


def _fields(item: Any) -> dict[str, object]:
    """Of a dataclass, by name."""
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}


def cache_fields(item: object) -> dict[str, object] | None:
    """What a cache of transformers holds, or a layer of one; None for anything else, such as a
    cache with a layer that holds more than tensors."""
    cls = type(item)
    if cls.__module__ != CACHES or cls.__name__ not in _HELD_BY or not _goes_on(item):
        return None
    pairs = {name: getattr(item, name, None) for name in _HELD_BY[cls.__name__]}
    parts = [part for held in pairs.values() for part in _parts(held)]
    if any(cache_fields(part) is None for part in parts if not _is_known(part)):
        return None
    return {name: held for name, held in pairs.items() if held is not None}


def holds_states(item: object) -> bool:
    """Whether it is a cache that holds what a state-space model remembers."""
    layers = getattr(item, "layers", ()) if cache_fields(item) is not None else ()
    return any(not set(_LINEAR).isdisjoint(cache_fields(layer) or {}) for layer in layers)


def _goes_on(item: Any) -> bool:
    """Whether the next call takes a cache's states as they are: it has neither been reset, nor is
    it to be cut to what it was before."""
    previous: dict[int, bool] = getattr(item, "has_previous_state", {})
    states: dict[int, object] = getattr(item, "conv_states", {})
    known = all(previous[number] or state is None for number, state in states.items())
    return known and not getattr(item, "record_past", False)


def _parts(held: object) -> Iterable[object]:
    """What a list or a dict of states holds, by itself whatever else."""
    if type(held) is dict:
        return held.values()
    return held if type(held) is list else (held,)


def _is_known(part: object) -> bool:
    return part is None or isinstance(part, torch.Tensor)


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
    """What stands in a nest of tuples, lists, dicts, caches and dataclasses with tensors, with the
    way to each.

    Args:
        objects: whether to look into all dataclasses and namespaces, by the names of their fields.
    """
    fields = fields_with_tensors(nest)
    if fields is not None:
        held: Iterable[tuple[str | int, object]] = fields.items()
    elif isinstance(nest, tuple | list):
        held = enumerate(nest)
    elif isinstance(nest, Mapping):
        held = nest.items()
    elif objects and dataclasses.is_dataclass(nest):
        held = _fields(nest).items()
    elif objects and isinstance(nest, types.SimpleNamespace):
        held = vars(nest).items()
    else:
        yield path, nest
        return
    for key, item in held:
        yield from leaves_of(item, (*path, key), objects=objects)
