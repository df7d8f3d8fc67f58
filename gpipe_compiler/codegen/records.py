"""The values of a spec as calls of their classes: `Crossing("x", 0, (1,), (4,), torch.int64)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import Any

from gpipe_compiler.codegen.constants import write_constant, write_nest
from gpipe_compiler.codegen.expressions import RawText
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, dict_of, lay_out, name, tuple_of
from gpipe_compiler.runtime import spec
from gpipe_compiler.runtime.sizes import Operation, Size, larger, smaller

_TAKEN = frozenset({*vars(spec), "ORDERS", "SPEC"})
"""What else is in a `schedule.py`, which no size is called."""


@dataclass(frozen=True)
class RecordWriter:
    """Writes values of a spec, and has the classes that stand in them imported.

    Attributes:
        home: the module of the package that has these classes.
    """

    imports: Imports
    home: str

    def record(self, cls: type[Any], values: Mapping[str, object]) -> Expression:
        """A call with keywords, one a line; what is as by default does not stand in it.

        Args:
            cls: a dataclass.
            values: of its fields; `RawText` for what is written as it is.

        Raises:
            UnwritableError: for what cannot be written down.
        """
        items = [
            self._field(values[field.name]).prefixed(f"{field.name}=")
            for field in dataclasses.fields(cls)
            if field.name in values and not _is_default(field, values[field.name])
        ]
        return call(self._imported(cls), items, exploded=True)

    def size(self, size: Size) -> list[str]:
        """The lines that name a size: `ids_1 = Size(name="ids.1", of=("ids", 1), example=64)`."""
        items = [
            self._write(getattr(size, field.name)).prefixed(f"{field.name}=")
            for field in dataclasses.fields(size)
        ]
        return lay_out(call(self._imported(Size), items), prefix=f"{variable_of(size.name)} = ")

    def _imported(self, cls: type[Any]) -> str:
        self.imports.name(self.home, cls.__name__)
        return cls.__name__

    def _write(self, value: object) -> Expression:
        """A nest of constants, enums, `RawText` and dataclasses."""
        return write_nest(value, self._leaf)

    def _leaf(self, item: object) -> Expression:
        match item:
            case Expression():
                return item
            case RawText(text=text):
                return name(text)
            case Size(name=own):
                return name(variable_of(own))
            case Operation():
                text = item.python({s.name: variable_of(s.name) for s in item.sizes()})
                called = [f.__name__ for f in (smaller, larger) if f"{f.__name__}(" in text]
                self.imports.name(self.home, *called)
                return name(text)
            case Enum():
                return name(f"{self._imported(type(item))}.{item.name}")
            case _ if dataclasses.is_dataclass(item) and not isinstance(item, type):
                return self._call(item)
            case _:
                return write_constant(item, self.imports)

    def _call(self, record: Any) -> Expression:
        """Fields without a default come first, by position unless they are a yes or no."""
        items = []
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not _is_default(field, value):
                keyword = not _required(field) or isinstance(value, bool)
                items.append(self._write(value).prefixed(f"{field.name}=" if keyword else ""))
        return call(self._imported(type(record)), items)

    def _field(self, value: object) -> Expression:
        """A value of a field; tuples of records and tables have one item a line."""
        match value:
            case tuple() if value and all(type(item) is int for item in value):
                return _numbers(value)
            case tuple() if any(isinstance(item, Expression) for item in value):
                return tuple_of(map(self._write, value), exploded=True)
            case tuple() if any(dataclasses.is_dataclass(item) for item in value):
                return tuple_of(map(self._write, value), exploded=len(value) > 1)
            case Mapping():
                pairs = [(self._write(k), self._write(v)) for k, v in value.items()]
                texts = all(isinstance(item, str) for item in value.values())
                return dict_of(pairs, exploded=texts)
            case _:
                return self._write(value)


def variable_of(size: str) -> str:
    """The variable of a size: `input_ids_1` of `input_ids.1`, `Leaf_` of `Leaf`."""
    text = size.replace(".", "_")
    return f"{text}_" if text in _TAKEN else text


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
