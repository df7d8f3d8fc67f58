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
    """What stands in a nest of tuples, lists and dicts, with the way to each.

    Args:
        objects: whether to look into dataclasses and namespaces too, by the names of their fields.
    """
    if isinstance(nest, tuple | list):
        held: Iterable[tuple[str | int, object]] = enumerate(nest)
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
