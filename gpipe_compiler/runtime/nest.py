"""Nests of tensors: tuples, lists and dicts in one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

Path = tuple[str | int, ...]
"""The way to a tensor: a key or an index for every level."""


def tensors_of(
    nest: object, path: Path = (), *, objects: bool = False
) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor in a nest of tuples, lists and dicts, with the way to it.

    Args:
        objects: whether to look into dataclasses too, by the names of their fields.
    """
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, tuple | list):
        for index, item in enumerate(nest):
            yield from tensors_of(item, (*path, index), objects=objects)
    elif isinstance(nest, Mapping):
        for key, item in nest.items():
            yield from tensors_of(item, (*path, key), objects=objects)
    elif objects and dataclasses.is_dataclass(nest):
        for field in dataclasses.fields(nest):
            value = getattr(nest, field.name)
            yield from tensors_of(value, (*path, field.name), objects=objects)
