"""Nests of tensors: tuples, lists and dicts in one another."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")

Path = tuple[str | int, ...]
"""The way to a tensor: a key or an index for every level."""


def tensors_of(nest: object, *, objects: bool = False) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor in a nest, with the way to it; see `items_of`."""
    return items_of(nest, torch.Tensor, objects=objects)


def values_of(nest: object) -> Iterator[tuple[Path, bool | float | str]]:
    """Every value of Python's in a nest, with the way to it."""
    yield from items_of(nest, int)
    yield from items_of(nest, float)
    yield from items_of(nest, str)


def items_of(
    nest: object, kind: type[T], path: Path = (), *, objects: bool = False
) -> Iterator[tuple[Path, T]]:
    """All of one type in a nest of tuples, lists and dicts, with the way to each.

    Args:
        objects: whether to look into dataclasses and namespaces too, by the names of their fields.
    """
    if isinstance(nest, kind):
        yield path, nest
    elif isinstance(nest, tuple | list):
        for index, item in enumerate(nest):
            yield from items_of(item, kind, (*path, index), objects=objects)
    elif isinstance(nest, Mapping):
        for key, item in nest.items():
            yield from items_of(item, kind, (*path, key), objects=objects)
    elif objects and dataclasses.is_dataclass(nest):
        for field in dataclasses.fields(nest):
            value = getattr(nest, field.name)
            yield from items_of(value, kind, (*path, field.name), objects=objects)
    elif objects and isinstance(nest, types.SimpleNamespace):
        yield from items_of(vars(nest), kind, path, objects=objects)
