"""A call of an aten operator, and the call that stands for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Argument = Any
"""An argument of a torch.fx call: a node, a constant, or a nest of them."""


@dataclass(frozen=True)
class Written:
    """A call as it is written: of a function, or of the tensor method of that name."""

    target: Callable[..., Any] | str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True)
class AtenCall:
    """A call of an aten operator, its arguments bound to the names of the schema.

    Attributes:
        values: every argument by name, defaults filled in.
        defaults: names of the arguments that equal their default.
    """

    overload: torch._ops.OpOverload
    values: Mapping[str, Argument]
    defaults: frozenset[str]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload: `add_`."""
        return self.overload._schema.name.partition("::")[2]

    def __getitem__(self, name: str) -> Argument:
        return self.values[name]

    def positional(self, *, skip: Sequence[str] = ()) -> tuple[Argument, ...]:
        """Positional arguments up to the last that differs from its default."""
        names = [a.name for a in self.overload._schema.arguments if not a.kwarg_only]
        names = [name for name in names if name not in skip]
        while names and names[-1] in self.defaults:
            names.pop()
        return tuple(self.values[name] for name in names)

    def keywords(self) -> dict[str, Argument]:
        """Keyword-only arguments that differ from their default."""
        return {
            a.name: self.values[a.name]
            for a in self.overload._schema.arguments
            if a.kwarg_only and a.name not in self.defaults
        }

    def given(self, *names: str) -> dict[str, Argument]:
        """Those of the arguments that differ from their default, by name."""
        return {name: self.values[name] for name in names if name not in self.defaults}


def bind(
    overload: torch._ops.OpOverload, args: Sequence[Argument], kwargs: Mapping[str, Argument]
) -> AtenCall:
    """A call's arguments under the names of the schema."""
    values: dict[str, Argument] = {}
    defaults: set[str] = set()
    for index, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else MISSING
        if index < len(args) and not argument.kwarg_only:
            value = args[index]
        else:
            value = kwargs.get(argument.name, default)
        values[argument.name] = value
        if _same(value, default):
            defaults.add(argument.name)
    return AtenCall(overload, values, frozenset(defaults))


MISSING = object()
"""In place of an argument that has no default and is not given."""


def _same(value: Argument, default: Argument) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return len(value) == len(default) and all(map(_same, value, default))
    return type(value) is type(default) and bool(value == default)


Rule = Callable[[AtenCall], "Written | None"]
"""How one operator is written; None where this call of it has no better form."""
