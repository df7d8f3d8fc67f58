"""Outputs in the model's own classes: named tuples, dataclasses, outputs of Hugging Face."""

from __future__ import annotations

import collections
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..spec import OutputClass
from .nest import Path


class Fields(dict[Any, Any]):
    """What a class of the model's own holds, where that class cannot be imported.

    A field is an attribute and an item.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def as_returned(nest: object, classes: Sequence[OutputClass]) -> object:
    """The same nest with objects of the model's classes where it has them."""
    return _walk(nest, {known.path: known for known in classes}, ()) if classes else nest


def _walk(item: object, classes: Mapping[Path, OutputClass], path: Path) -> object:
    made: object
    match item:
        case dict():
            made = {key: _walk(value, classes, (*path, key)) for key, value in item.items()}
        case list() | tuple():
            made = type(item)(_walk(value, classes, (*path, i)) for i, value in enumerate(item))
        case _:
            return item
    return made if path not in classes else _made(classes[path], made)


def _made(known: OutputClass, held: Any) -> object:
    cls: Any = _imported(known.module, known.name)
    if known.fields:
        if getattr(cls, "_fields", None) == known.fields:
            return cls._make(held)
        plain: Any = collections.namedtuple(known.name.split(".")[-1], known.fields)  # type: ignore[misc]  # made at run time
        return plain(*held)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        try:
            made = _dataclass(cls, held)
            if all(getattr(made, name) is value for name, value in held.items()):
                return made
        except Exception:  # noqa: BLE001  # whatever the user's class raises
            return Fields(held)
    factory = _imported(*known.factory) if known.factory else None
    lacking = cls is None or (known.factory and factory is None)
    return Fields(held) if lacking else _mapping(cls, held, factory)


def _dataclass(cls: Any, held: Mapping[str, Any]) -> Any:
    """An object of a dataclass; what its constructor does not take is set, as it was returned."""
    set_later = {field.name for field in dataclasses.fields(cls) if not field.init}
    taken = {name: value for name, value in held.items() if name not in set_later}
    made = cls(**{**dict.fromkeys(_needed(cls)), **taken})
    for name in set_later & held.keys():
        object.__setattr__(made, name, held[name])
    return made


def _mapping(cls: Any, held: Mapping[Any, Any], factory: object) -> object:
    """A mapping of a class that is made empty and then filled, as those of Python are."""
    try:
        made = cls()
        if factory is not None:
            made.default_factory = factory
        made.update(held)
        same = all(made[key] is value for key, value in held.items())
        return made if same and len(made) == len(held) else Fields(held)
    except Exception:  # noqa: BLE001  # whatever the user's class raises
        return Fields(held)


def _needed(cls: Any) -> list[str]:
    """The fields that an object cannot be made without; those that are None are not known."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is missing and field.default_factory is missing
    ]


def _imported(module: str, name: str) -> object:
    """What can be imported by this name, None where nothing can."""
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # noqa: BLE001  # whatever the user's module raises
        return None
    return found
