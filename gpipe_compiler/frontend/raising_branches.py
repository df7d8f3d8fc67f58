"""Passes the checks of a model, branches that do nothing but raise, as a trace has no numbers.

`if labels.max() >= self.classes: raise ValueError(...)` and `assert (x > 0).all()` compute nothing.
Like `torch._check` they stand in no graph: on what the model takes, the package computes the same.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gpipe_compiler.frontend.locate import frames_of_model, is_users


@contextlib.contextmanager
def checks_passed() -> Iterator[None]:
    """Lets what is traced inside pass its own checks of the values of tensors."""
    of_tensor: Callable[[torch.Tensor], bool] = torch.Tensor.__bool__
    of_size: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def tensor_is_true(tensor: torch.Tensor) -> bool:
        passing = _passing(sys._getframe(1)) if get_proxy_mode() is not None else None
        return of_tensor(tensor) if passing is None else passing

    def size_is_true(size: torch.SymBool) -> bool:
        frame = sys._getframe(1)
        asks = is_users(frame.f_code.co_filename) and free_unbacked_symbols(size)
        passing = _passing(frame) if asks else None
        return of_size(size) if passing is None else passing

    with (
        mock.patch.object(torch.Tensor, "__bool__", tensor_is_true),
        mock.patch.object(torch.SymBool, "__bool__", size_is_true),
    ):
        yield


def _passing(frame: FrameType) -> bool | None:
    """What a condition has to be for a check to pass; None where the line is no check.

    An exception that the model may catch is none: what it does then is another way to compute.

    Args:
        frame: whose line asks for the truth of something.
    """
    file, line = frame.f_code.co_filename, frame.f_lineno
    found = [passing for first, last, passing in _statements(file).checks if first <= line <= last]
    caught = any(
        first <= number <= last
        for name, number, _ in frames_of_model(frame)
        if is_users(name)
        for first, last in _statements(name).guarded
    )
    return found[0] if len(found) == 1 and not caught else None


class _Statements(ast.NodeVisitor):
    """The conditions of a file, and the lines whose exceptions it may catch.

    Attributes:
        checks: of every condition its first and last line, and what all its parts have to be for
            nothing to be raised; None where they have to differ, or it decides something else.
        guarded: the first and last line of every block that may catch an exception.
    """

    def __init__(self) -> None:
        self.checks: list[tuple[int, int, bool | None]] = []
        self.guarded: list[tuple[int, int]] = []

    def visit_If(self, node: ast.If) -> None:
        """`if wrong: raise`, or `if right: ... else: raise`."""
        checks = _raises(node.body) or _raises(node.orelse)
        self._condition(node.test, not _raises(node.body) if checks else None)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """`assert right`."""
        self._condition(node.test, True)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """Its handlers may go on, unless they raise again."""
        if not all(isinstance(handler.body[-1], ast.Raise) for handler in node.handlers):
            self.guarded.append((node.body[0].lineno, node.body[-1].end_lineno or 0))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        """`contextlib.suppress` goes on."""
        if any("suppress" in ast.dump(item.context_expr) for item in node.items):
            self.guarded.append((node.body[0].lineno, node.body[-1].end_lineno or 0))
        self.generic_visit(node)

    def _condition(self, test: ast.expr, passing: bool | None) -> None:
        """Notes one, and what it has to be."""
        asked = {passing is as_it for as_it in _parts(test)} if passing is not None else set()
        only = asked.pop() if len(asked) == 1 else None
        self.checks.append((test.lineno, test.end_lineno or test.lineno, only))


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a block does nothing but raise an exception, whose message it may prepare."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    return all(isinstance(statement, ast.Assign | ast.Expr) for statement in body[:-1])


def _parts(test: ast.expr) -> Iterator[bool]:
    """For every part whose truth is asked, whether the whole holds as it does, or as it does not.

    Both for what chooses within an expression.
    """
    match test:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from (not as_it for as_it in _parts(operand))
        case _:
            yield True
            chooses = (ast.BoolOp, ast.IfExp, ast.Not, ast.NamedExpr, ast.Lambda)
            if any(isinstance(inner, chooses) for inner in ast.walk(test)):
                yield False


@cache
def _statements(file: str) -> _Statements:
    """Those of a file; none for one that cannot be read."""
    found = _Statements()
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        found.visit(ast.parse(Path(file).read_text(encoding="utf-8")))
    return found
