"""The values of Python's in a call, as text that differs where they do."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import cast

import torch

from .nest import Path, leaves_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_READABLE = 100
"""The longest text, in characters, that stays as it is."""


def values_of(nest: object) -> Iterator[tuple[Path, object]]:
    """What is no tensor in a nest of tuples, lists and dicts, with the way to it."""
    for path, item in leaves_of(nest):
        if not isinstance(item, torch.Tensor):
            yield path, item


def as_text(value: object) -> str:
    """A value as text: the same for values that pickle would write alike, and no others.

    Raises:
        TypeError: when pickle could not write it, as a generator or an open file.
    """
    text = _text(value, ())
    if len(text) <= _READABLE:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: _READABLE // 2]}... ({digest[:16]})"


def _text(value: object, above: tuple[object, ...]) -> str:
    """See `as_text`.

    Args:
        above: the objects that this one is a part of.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if any(value is outer for outer in above):
        return "..."
    inner = functools.partial(_text, above=(*above, value))
    match value:
        case torch.Tensor():
            content = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()[:16]
            return f"tensor({tuple(value.shape)}, {value.dtype}, {content})"
        case types.FunctionType():
            code = value.__code__
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = code.co_code, code.co_names, code.co_consts, value.__defaults__, held
            return f"{_name(value)}({', '.join(map(inner, parts))})"
        case types.CodeType():
            return inner((value.co_code, value.co_names, value.co_consts))
        case type() | types.BuiltinFunctionType():
            return _name(value)
        case types.ModuleType():
            return value.__name__
        case tuple() | list() if type(value) in (tuple, list):
            listed = ", ".join(map(inner, value))
            return f"[{listed}]" if isinstance(value, list) else f"({listed},)"
        case set() | frozenset():
            return f"{_name(type(value))}({', '.join(sorted(map(inner, value)))})"
        case dict() if type(value) is dict:
            return f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in value.items())}}}"
    return _as_pickled(value, inner)


def _as_pickled(value: object, inner: functools.partial[str]) -> str:
    """An object of any class as `object.__reduce_ex__` takes it apart."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return reduced
    make, made_of, *rest = cast("tuple[object, tuple[object, ...], object]", reduced)
    if make is getattr(copyreg, "__newobj__", None):
        make, made_of = made_of[0], made_of[1:]
    parts = [inner(part) for part in made_of]
    for part in rest:
        if isinstance(part, Mapping):
            parts += (f"{name}={inner(held)}" for name, held in part.items())
        elif part is not None:
            parts.append(inner(list(part) if isinstance(part, Iterator) else part))
    return f"{_name(make)}({', '.join(parts)})"


def _name(item: object) -> str:
    return getattr(item, "__qualname__", None) or type(item).__qualname__
