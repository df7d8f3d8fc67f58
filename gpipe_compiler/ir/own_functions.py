"""Functions with a backward of the user's own, which a graph holds whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import FunctionCall, ops_within

Files: TypeAlias = tuple[tuple[str, tuple[tuple[int, str], ...]], ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Where a class stands for whoever runs a package.

    Attributes:
        module: that it is imported from; `.own_model` for a file of the package.
        files: the package's own files that this takes: each by its name, with the text of every
            statement and the line where it stands at the user's.
    """

    module: str
    files: Files = ()


class OwnFunction(torch._ops.HigherOrderOperator):
    """Calls `cls.apply`: in a trace by torch.export it is an operator, in a graph a function.

    Attributes:
        cls: the torch.autograd.Function.
        written: where it stands for a package.
    """

    def __init__(self, cls: type[torch.autograd.Function], written: Written) -> None:
        super().__init__(f"own_{cls.__name__}")  # type: ignore[no-untyped-call]  # of torch
        self.cls, self.written = cls, written

    def __call__(self, /, *args: object) -> object:
        """What the user's function gives."""
        made: object = self.cls.apply(*args)  # type: ignore[no-untyped-call]  # of torch
        return made

    def __reduce__(self) -> tuple[object, ...]:
        """As the one object that stands for its class."""
        return own_function, (self.cls, self.written)


@cache
def own_function(cls: type[torch.autograd.Function], written: Written) -> OwnFunction:
    """The one object that stands for a class."""
    return OwnFunction(cls, written)


def own_functions(graph: Graph) -> Iterator[OwnFunction]:
    """Those that a graph calls, regions included."""
    for op in graph.ops:
        for inner in ops_within(op):
            call = inner.call
            if isinstance(call, FunctionCall) and isinstance(call.function, OwnFunction):
                yield call.function
