"""Tuples, lists and dicts in one another: the tensors in them, and other values as text."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

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


# --- the values of Python's in a call, as text that differs where they do -----------------------

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
