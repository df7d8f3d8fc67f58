"""The values of a spec as calls of their classes: `Crossing("x", 0, (1,), (4,), torch.int64)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from enum import Enum
from typing import Any

from gpipe_compiler.codegen.constants import write_constant, write_nest
from gpipe_compiler.codegen.expressions import RawText
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, dict_of, lay_out, name, tuple_of
from gpipe_compiler.runtime import spec
from gpipe_compiler.runtime.sizes import Operation, Size

_TAKEN = frozenset({*vars(spec), "ORDERS", "SPEC"})
"""What else is in a `schedule.py`, which no size is called."""


def write_record(cls: type[Any], values: Mapping[str, object], imports: Imports) -> Expression:
    """A call with keywords, one a line; what is as by default does not stand in it.

    Args:
        cls: a dataclass.
        values: of its fields; `RawText` for what is written as it is.

    Raises:
        UnwritableError: for what cannot be written down.
    """
    fields = [field for field in dataclasses.fields(cls) if field.name in values]
    items = [
        _field(values[field.name], imports).prefixed(f"{field.name}=")
        for field in fields
        if not _is_default(field, values[field.name])
    ]
    return call(cls.__name__, items, exploded=True)


def _write(value: object, imports: Imports) -> Expression:
    """A nest of constants, enums, `RawText` and dataclasses."""

    def leaf(item: object) -> Expression:
        match item:
            case Expression():
                return item
            case RawText(text=text):
                return name(text)
            case Size(name=own):
                return name(variable_of(own))
            case Operation():
                return name(item.python({s.name: variable_of(s.name) for s in item.sizes()}))
            case Enum():
                return name(f"{type(item).__name__}.{item.name}")
            case _ if dataclasses.is_dataclass(item) and not isinstance(item, type):
                return _call(item, imports)
            case _:
                return write_constant(item, imports)

    return write_nest(value, leaf)


def write_size(size: Size, imports: Imports) -> list[str]:
    """The lines that name a size: `ids_1 = Size(name="ids.1", of=("ids", 1), example=64)`."""
    items = [
        _write(getattr(size, field.name), imports).prefixed(f"{field.name}=")
        for field in dataclasses.fields(size)
    ]
    return lay_out(call(Size.__name__, items), prefix=f"{variable_of(size.name)} = ")


def variable_of(size: str) -> str:
    """The variable of a size: `input_ids_1` of `input_ids.1`, `Leaf_` of `Leaf`."""
    text = size.replace(".", "_")
    return f"{text}_" if text in _TAKEN else text


def _call(record: Any, imports: Imports) -> Expression:
    """Fields without a default come first, by position unless they are a yes or no."""
    items = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not _is_default(field, value):
            keyword = not _required(field) or isinstance(value, bool)
            items.append(_write(value, imports).prefixed(f"{field.name}=" if keyword else ""))
    return call(type(record).__name__, items)


def _field(value: object, imports: Imports) -> Expression:
    """A value of a field; tuples of records and tables have one item a line."""
    match value:
        case tuple() if value and all(type(item) is int for item in value):
            return _numbers(value)
        case tuple() if any(isinstance(item, Expression) for item in value):
            return tuple_of([_write(item, imports) for item in value], exploded=True)
        case tuple() if any(dataclasses.is_dataclass(item) for item in value):
            items = [_write(item, imports) for item in value]
            return tuple_of(items, exploded=len(items) > 1)
        case Mapping():
            pairs = [(_write(k, imports), _write(v, imports)) for k, v in value.items()]
            return dict_of(pairs, exploded=all(isinstance(item, str) for item in value.values()))
        case _:
            return _write(value, imports)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return field.default is not MISSING and bool(value == field.default)


def _numbers(numbers: Sequence[int]) -> Expression:
    """Numbers as a tuple, long runs of them as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[Expression] = []
    for run in runs:
        if len(run) > 3:
            start = f"{run[0]}, " if run[0] else ""
            parts.append(name(f"*range({start}{run[-1] + 1})"))
        else:
            parts.extend(name(str(number)) for number in run)
    if len(parts) == 1 and parts[0].flat.startswith("*"):
        return call("tuple", [name(parts[0].flat[1:])])
    return tuple_of(parts)
