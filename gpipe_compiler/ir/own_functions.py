"""Functions with a backward of their own that a graph holds whole: the user's, or hooks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

Files: TypeAlias = tuple[tuple[str, tuple[tuple[int, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class WrittenClass:
    """Where a class stands for whoever runs a package.

    Attributes:
        module: that it is imported from; `.own_model` for a file of the package.
        files: the package's own files that this takes: each by its name, with the text of every
            statement and the line where it stands at the user's.
    """

    module: str
    files: Files = ()


class OwnFunction(torch._ops.HigherOrderOperator):
    """Calls `cls.apply`: a function of its own in a graph.

    Attributes:
        cls: the torch.autograd.Function.
        written: where it stands for a package.
        text: the whole of the file that makes it, where the compiler has written that.
    """

    def __init__(self, cls: Any, written: WrittenClass, text: str = "") -> None:
        name = cls.__name__.lower() if text else f"own_{cls.__name__}"
        super().__init__(name)  # type: ignore[no-untyped-call]  # of torch
        self.cls, self.written, self.text = cls, written, text

    @property
    def spelling(self) -> str:
        """How its file calls it."""
        return f"{self.cls.__name__}.apply"

    def __call__(self, /, *args: object) -> object:
        """What the user's function gives."""
        made: object = self.cls.apply(*args)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        """As the one object that stands for its class."""
        if self.text:
            return function_of_text, (self.cls.__name__, self.text)
        return own_function, (self.cls, self.written)


@cache
def own_function(cls: type[torch.autograd.Function], written: WrittenClass) -> OwnFunction:
    """The one object that stands for a class."""
    return OwnFunction(cls, written)


@cache
def function_of_text(name: str, text: str) -> OwnFunction:
    """The class of a name that a file makes, which the compiler has written."""
    made: dict[str, Any] = {"__name__": name}
    exec(compile(text, f"<{name}>", "exec"), made)
    file = f"own_{name.lower()}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return OwnFunction(made[name], WrittenClass(f".{file}", ((file, ((0, text),)),)), text)
