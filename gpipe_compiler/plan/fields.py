"""The parts of a plan as values of JSON, and back: by the types that their fields are declared as.

Dataclasses are objects, named tuples and tuples lists, an Enum its value, a dtype its name, a size
that is free that of the example. A class that is written in another way has methods `to_fields` and
`from_fields` of its own.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from gpipe_compiler.runtime.sizes import Expression, example_shape

T = TypeVar("T")

LARGEST = 2**62
"""Whole numbers in a file are smaller: bytes, counts, places."""

LARGEST_FLOAT = 1e100
"""Other numbers are: seconds, bytes and operations a second; products of two do not overflow."""


def to_fields(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Expression):
        return example_shape((value,))[0]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {key: to_fields(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_fields(item) for item in value]
    return value.to_fields() if hasattr(value, "to_fields") else own_fields(value)


def own_fields(item: Any) -> dict[str, Any]:
    """A dataclass as an object of JSON."""
    return {f.name: to_fields(getattr(item, f.name)) for f in dataclasses.fields(item)}


def from_fields(cls: type[T], fields: Mapping[str, Any], where: str = "") -> T:
    """The dataclass that `own_fields` gave; what is missing is as by default.

    Raises:
        TypeError: naming the first value that is of another type or too large, or for fields that
            there are not, or that are missing and have no default.
    """
    return cls(**typed(cls, fields, where))


def typed(cls: type, fields: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values of JSON as the types of a dataclass's fields; those of no field as they are."""
    hints = _hints(cls)
    return {
        name: _typed(hints[name], value, f"{where}.{name}" if where else name)
        if name in hints
        else value
        for name, value in fields.items()
    }


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, localns={"torch": torch})  # which some import for types alone


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as the type that it stands for."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        (kind,) = (option for option in args if option not in (types.NoneType, Expression))
        return _typed(kind, value, where)
    if isinstance(value, list):
        kinds = _of_items(kind, origin, args, len(value))
        if kinds is not None:
            items = [_typed(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value)]
            return kind(*items) if origin is None else tuple(items)
    elif isinstance(value, dict):
        if hasattr(kind, "from_fields"):
            return kind.from_fields(value, where)
        if dataclasses.is_dataclass(kind):
            return from_fields(kind, value, where)  # type: ignore[arg-type]  # a class it is
    elif kind is torch.dtype and isinstance(getattr(torch, str(value), None), torch.dtype):
        return getattr(torch, value)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    elif _is_plain(value, kind):
        return value
    raise TypeError(f"{where} is {value!r:.40}")


def _of_items(kind: Any, origin: Any, args: Sequence[Any], count: int) -> Sequence[Any] | None:
    """The type of each item of such a list; None where there is to be no such list."""
    if isinstance(kind, type) and issubclass(kind, tuple):
        args = tuple(_hints(kind).values())
    elif not (isinstance(origin, type) and issubclass(origin, Sequence)):
        return None
    elif origin is not tuple or args[-1] is Ellipsis:
        return (args[0],) * count
    return args if len(args) == count else None


def _is_plain(value: object, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) < LARGEST_FLOAT  # type: ignore[arg-type]
    if kind is int:
        return type(value) is int and abs(value) < LARGEST
    return type(value) is kind
