"""Source text of constants, and of tuples, lists and dicts of them."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable

import torch

from gpipe_compiler.codegen.functions import spell
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Binding, Expression, call, dict_of, list_of, tuple_of
from gpipe_compiler.frontend.own_statements import UnwritableError

_LONG = 10
"""Characters from which on a number means nothing to a reader."""

_LEAST_ROOT = 1e-4
"""Smaller numbers are no scales of attention."""

LeafWriter = Callable[[object], Expression]


def write_literal(value: object, imports: Imports) -> Expression:
    """A constant or a nest of constants.

    Raises:
        UnwritableError: for an object that cannot be written down.
    """
    return write_nest(value, lambda leaf: write_constant(leaf, imports))


def write_nest(value: object, leaf: LeafWriter) -> Expression:
    """Tuples, lists, dicts and slices, with `leaf` for what stands inside."""
    match value:
        case torch.Size() | tuple():
            return tuple_of([write_nest(item, leaf) for item in value])
        case list():
            return list_of(write_nest(item, leaf) for item in value)
        case dict():
            return dict_of(
                (write_nest(key, leaf), write_nest(item, leaf)) for key, item in value.items()
            )
        case slice(start=None, stop=stop, step=None):
            return call("slice", [write_nest(stop, leaf)])
        case slice(start=start, stop=stop, step=None):
            return call("slice", [write_nest(start, leaf), write_nest(stop, leaf)])
        case slice(start=start, stop=stop, step=step):
            return call("slice", [write_nest(part, leaf) for part in (start, stop, step)])
        case _:
            return leaf(value)


def write_constant(value: object, imports: Imports) -> Expression:
    """One constant; see `spell_constant`.

    Raises:
        UnwritableError: for an object that cannot be written down.
    """
    root = _root(value) if isinstance(value, float) else None
    if root is not None:
        return Expression(root, Binding.POWER)
    text = spell_constant(value, imports)
    if text is None:
        raise UnwritableError(f"there is no way to write {value!r} ({type(value).__name__}) down")
    return Expression(text, Binding.UNARY if text.startswith("-") else Binding.ATOM)


def spell_constant(value: object, imports: Imports) -> str | None:
    """A constant as one would type it; None for what cannot be written down."""
    match value:
        case enum.Enum():
            owner = spell(type(value), imports)
            return None if owner is None else f"{owner}.{value.name}"
        case None | bool() | int() | complex():
            return repr(value)
        case float():
            return _spell_float(value, imports)
        case str():
            return quote(value)
        case _ if value is Ellipsis:
            return "..."
        case torch.dtype() | torch.layout() | torch.memory_format():
            imports.module("torch")
            return str(value)
        case torch.device():
            imports.module("torch")
            return f"torch.device({quote(str(value))})"
        case _ if callable(value):
            return spell(value, imports)
        case _:
            return None


def _root(number: float) -> str | None:
    """`64**-0.5`, as attention is scaled, or `64**0.5`, for a number that is exactly this."""
    if not _LEAST_ROOT < number < 1 / _LEAST_ROOT or len(repr(number)) < _LONG:
        return None
    for power in (-0.5, 0.5, -0.25):
        whole = round(number ** (1 / power))
        if 1 < whole < _LEAST_ROOT**-2 and whole**power == number:
            return f"{whole}**{power}"
    return None


def _spell_float(value: float, imports: Imports) -> str:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for end in ("min", "max"):
            if value == getattr(torch.finfo(dtype), end):
                imports.module("torch")
                return f"torch.finfo({dtype}).{end}"
    if math.isfinite(value):
        text, short = repr(value), f"{value:g}"
        whole = len(text) < _LONG or float(short) != value
        return re.sub(r"e\+?(-?)0?", r"e\1", text if whole else short)  # `1e-5`, as people have it
    imports.module("math")
    if math.isnan(value):
        return "math.nan"
    return "math.inf" if value > 0 else "-math.inf"


def quote(text: str) -> str:
    """A string literal in the quotes that ruff prefers."""
    literal = repr(text)
    if literal[0] == "'" and '"' not in literal:
        return f'"{literal[1:-1]}"'
    return literal
