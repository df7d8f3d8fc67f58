"""Whether a dataclass that was read from a file holds what its fields are declared as."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

LARGEST = 2**62
"""Whole numbers in a file are smaller: bytes, counts, places."""

LARGEST_FLOAT = 1e100
"""Other numbers are: seconds, bytes and operations a second; products of two do not overflow."""


def check_fields(item: Any, where: str = "") -> None:
    """Makes sure that every field of a dataclass, and of those in it, has the type it should.

    Raises:
        TypeError: naming the first that has not.
    """
    for name, kind in _hints(item.__class__).items():
        place = f"{where}.{name}" if where else name
        if not _fits(getattr(item, name), kind, place):
            raise TypeError(f"{place} is {getattr(item, name)!r:.40}")


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls, localns={"torch": torch})  # which some import for types alone
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fits(value: Any, kind: Any, where: str) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option, where) for option in args)
    if origin is tuple and args[-1] is not Ellipsis:
        pairs = zip(value, args, strict=False) if isinstance(value, tuple) else ()
        return len(args) == len(tuple(value)) and all(_fits(*pair, where) for pair in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _all(value.values(), args[1], where)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, tuple) and _all(value, args[0], where)
    if kind is float:
        return type(value) in (int, float) and abs(value) < LARGEST_FLOAT
    if kind is int:
        return type(value) is int and abs(value) < LARGEST
    if not isinstance(value, kind if kind is not None else type(None)):
        return False
    if dataclasses.is_dataclass(value):
        check_fields(value, where)
    return True


def _all(values: Iterable[Any], kind: Any, where: str) -> bool:
    return all(_fits(value, kind, f"{where}[{i}]") for i, value in enumerate(values))
