"""The user's lines that look at sizes while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.frontend.locate import calling_line, chooses_kernel, is_asked_by_user
from gpipe_compiler.ir.sizes import UNKNOWN_LINE
from gpipe_compiler.ir.symbolic import expression_of, is_symbolic

_LONGEST = 100
"""Symbols, numbers and operators in a condition on sizes that torch still reasons about: as many
make a trace a few times slower, and what follows of them no one can read."""


@dataclass
class NotedSizes:
    """The user's lines that looked at sizes while a model was traced.

    Attributes:
        fixed: by the symbol of a size, the line that turned it into a number.
        made_numbers: those of them that the user's own code did, and no function that it called.
        guards: by what they compared.
        of_kernels: what decides which kernel of a convolution runs, to the same result.
        asked: what the user's own code compared, and no function that it called.
        settled: of that, with its lines, what torch answers without a guard.
        ties: dimensions of inputs, by the number of the input, that are of one size: the batch,
            and those that are to be free.
    """

    ties: Sequence[Sequence[tuple[int, int]]] = ()
    fixed: dict[Any, SourceLocation] = field(default_factory=dict)
    made_numbers: set[Any] = field(default_factory=set)
    guards: dict[Any, SourceLocation] = field(default_factory=dict)
    of_kernels: set[Any] = field(default_factory=set)
    asked: set[Any] = field(default_factory=set)
    settled: dict[Any, SourceLocation | None] = field(default_factory=dict)
    _examples: Mapping[Any, int] = field(default_factory=dict)

    def begin(self, inputs: Sequence[torch.Tensor], *, must: bool) -> None:
        """Has torch rely on what is of one size, before a model is run on inputs.

        Args:
            must: whether sizes have to be free, however long that takes.
        """
        for (one, dim), *others in filter(None, self.ties):
            for other, place in others:
                bool(inputs[one].shape[dim] == inputs[other].shape[place])
        sizes: list[Any] = [inputs[i].shape[d] for places in self.ties[1:] for i, d in places]
        self._examples = {
            expression_of(n): n.node.hint for n in sizes if is_symbolic(n) and not must
        }

    def fix_long(self, environment: ShapeEnv, guard: Any) -> None:
        """Fixes the sizes in a guard that torch would take too long to reason about."""
        if sum(1 for _ in sympy.preorder_traversal(guard)) > _LONGEST:
            for symbol in self._examples.keys() & guard.free_symbols:
                environment._set_replacement(symbol, sympy.Integer(self._examples[symbol]), "long")

    def made_number(self, size: Any) -> SourceLocation | None:
        """The user's own line that took a size for a number, as `range(length)` does."""
        symbol = size.node._expr if isinstance(size, torch.SymInt) else None
        return self.fixed.get(symbol) if symbol in self.made_numbers else None

    def line_of(self, size: Any) -> SourceLocation | None:
        """The line that fixed a size, by itself or together with others."""
        if not isinstance(size, torch.SymInt):
            return next(iter(self.fixed.values()), None)
        symbol = size.node._expr  # before it was replaced by what it was found to be
        guards = (line for guard, line in self.guards.items() if symbol in guard.free_symbols)
        return self.fixed.get(symbol) or next(guards, None)

    def where(self, guard: Any) -> str:
        """The line that compared something, with what stands there."""
        found = self.guards.get(guard)
        return UNKNOWN_LINE if found is None else found.brief


@contextlib.contextmanager
def noting_sizes() -> Iterator[NotedSizes]:
    """Collects the user's lines that look at sizes, while it is open."""
    noted = NotedSizes()
    replaced, logged = ShapeEnv._set_replacement, ShapeEnv._log_guard
    evaluated = ShapeEnv.evaluate_expr

    def replace(environment: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        where = calling_line() if value.is_number else None
        if where is not None:
            noted.fixed.setdefault(symbol, where)
            if is_asked_by_user():
                noted.made_numbers.add(symbol)
        replaced(environment, symbol, value, *rest)

    def log(environment: ShapeEnv, prefix: str, guard: Any, *rest: Any, **named: Any) -> None:
        where = calling_line()
        if where is not None:
            noted.guards.setdefault(guard, where)
        if is_asked_by_user():
            noted.asked.add(guard)
        if chooses_kernel():
            noted.of_kernels.add(guard)
        logged(environment, prefix, guard, *rest, **named)
        noted.fix_long(environment, guard)

    def evaluate(environment: ShapeEnv, asked: Any, *rest: Any, **named: Any) -> Any:
        if asked.is_Relational and asked.free_symbols and is_asked_by_user():
            noted.settled.setdefault(asked, calling_line())
        return evaluated(environment, asked, *rest, **named)

    with (
        mock.patch.object(ShapeEnv, "_set_replacement", replace),
        mock.patch.object(ShapeEnv, "_log_guard", log),
        mock.patch.object(ShapeEnv, "evaluate_expr", evaluate),
    ):
        yield noted
