"""Passes the checks of a model, branches that do nothing but raise, as a trace has no numbers.

`if labels.max() >= self.classes: raise ValueError(...)` and `assert (x > 0).all()` compute nothing.
Like `torch._check` they stand in no graph: on what the model takes, the package computes the same.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import itertools
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch.distributions import constraints
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gpipe_compiler.errors import Notice
from gpipe_compiler.frontend.locate import asking_frame, frames_of_model, is_users, location


@contextlib.contextmanager
def checks_passed() -> Iterator[None]:
    """Lets what is traced inside pass its own checks of the values of tensors, and says which."""
    passed: dict[str, None] = {}

    def note(frame: FrameType) -> None:
        passed[location(frame.f_code.co_filename, frame.f_lineno).brief.rstrip(":")] = None

    def passing(frame: FrameType) -> bool | None:
        if frame.f_code.co_filename == constraints.__file__:
            return True  # so far, of several that one of torch.distributions has to fulfil
        found = passing_at(frame)
        if found is not None:
            note(frame)
        return found

    of_tensor: Callable[[torch.Tensor], bool] = torch.Tensor.__bool__
    of_size: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def tensor_is_true(tensor: torch.Tensor) -> bool:
        found = None
        if isinstance(tensor, FakeTensor):
            found = passing(asking_frame(sys._getframe(1)))
        return of_tensor(tensor) if found is None else found

    tensor_is_true.__name__ = of_tensor.__name__  # by which modes know it

    def size_is_true(size: torch.SymBool) -> bool:
        frame = sys._getframe(1)
        asks = is_users(frame.f_code.co_filename) and free_unbacked_symbols(size)
        found = passing(frame) if asks else None
        return of_size(size) if found is None else found

    own_assert: Callable[..., None] = torch._assert_async

    def asserted(*args: object, **named: object) -> None:
        note(sys._getframe(1))
        own_assert(*args, **named)

    with (
        mock.patch.object(torch, "_assert_async", asserted),
        mock.patch.object(torch.Tensor, "__bool__", tensor_is_true),
        mock.patch.object(torch.SymBool, "__bool__", size_is_true),
    ):
        yield
    for line in passed:
        text = f"{line}: this check is not in the package, as it only raises"
        warnings.warn(Notice(text), stacklevel=1)


def passing_at(frame: FrameType) -> bool | None:
    """What a condition has to be for a check to pass; None where the line is no check.

    An exception that the model may catch is none: what it does then is another way to compute.

    Args:
        frame: whose line asks for the truth of something.
    """
    asking = _instruction(frame)
    checks = _statements(frame.f_code.co_filename).checks if asking else ()
    found = [c.passing_at(frame) for c in checks if asking and c.is_asked_at(asking)]
    caught = any(
        first <= number <= last
        for name, number, _ in frames_of_model(frame)
        if is_users(name)
        for first, last in _statements(name).guarded
    )
    return found[0] if len(found) == 1 and not caught else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Lines and columns, from and to, of a piece of a file."""

    begin: tuple[int, int]
    end: tuple[int, int]

    @classmethod
    def of(cls, node: ast.expr | ast.stmt) -> _Place:
        """Where an expression or a statement stands."""
        end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return cls((node.lineno, node.col_offset), end)


@dataclass(frozen=True, slots=True)
class _Check:
    """A condition.

    Attributes:
        statement: it stands in.
        parts: in order, what each has to be for nothing to be raised; None for one that chooses
            within itself; () where the condition decides something else.
        places: of the parts.
    """

    statement: _Place
    condition: _Place
    parts: tuple[bool | None, ...]
    places: tuple[_Place, ...]

    def passing_at(self, frame: FrameType) -> bool | None:
        """What the part has to be whose truth a frame asks; None where that is not known."""
        if len(set(self.parts)) == 1:
            return self.parts[0]
        asked = [
            instruction.offset
            for instruction in dis.get_instructions(frame.f_code)
            if "POP_JUMP" in instruction.opname
            and (place := _place_of(instruction.positions)) is not None
            and self.is_asked_at(place)
        ]
        asking = _instruction(frame)
        if frame.f_lasti not in asked and asking in self.places:
            # A call that asks within itself, as torch.equal does.
            return self.parts[self.places.index(asking)]
        # Each part is asked by a jump of its own, and Python may name the statement for it, or
        # another part.
        if len(asked) != len(self.parts) or None in self.parts or frame.f_lasti not in asked:
            return None
        return self.parts[asked.index(frame.f_lasti)]

    def is_asked_at(self, place: _Place) -> bool:
        """Whether its truth is asked there, or that of a part; Python may name the statement."""
        within = self.condition.begin <= place.begin and place.end <= self.condition.end
        return within or place == self.statement


def _instruction(frame: FrameType) -> _Place | None:
    """What a frame is executing; other conditions may stand in the same line. None where Python
    does not know."""
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    return _place_of(next(positions))


def _place_of(positions: Sequence[int | None] | None) -> _Place | None:
    line, last, column, end = positions or (None,) * 4
    if line is None or last is None or column is None or end is None:
        return None
    return _Place((line, column), (last, end))


_CATCHING = frozenset({"__next__", "__getitem__", "__getattr__", "__getattribute__"})
"""Methods whose exceptions tell Python something, such as where a loop ends."""


class _Statements(ast.NodeVisitor):
    """The conditions of a file, and the lines whose exceptions may be caught.

    Attributes:
        guarded: the first and last line of every block whose exceptions may be caught.
    """

    def __init__(self) -> None:
        self.checks: list[_Check] = []
        self.guarded: list[tuple[int, int]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Python itself may catch what it raises."""
        if node.name in _CATCHING:
            self._guard(node.body)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """`if wrong: raise`, or `if right: ... else: raise`."""
        checks = _raises(node.body) or _raises(node.orelse)
        self._condition(node, not _raises(node.body) if checks else None)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._condition(node, True)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        """Its handlers may go on, unless they raise again."""
        again = all(isinstance(h.body[-1], ast.Raise) for h in node.handlers)
        if not again or any(map(_leaves, (*node.handlers, *node.finalbody))):
            self._guard(node.body)
        self.generic_visit(node)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self.visit_Try(node)

    def visit_With(self, node: ast.With) -> None:
        """Those that torch has catch nothing; another may, as `contextlib.suppress`."""
        if not all(_is_of_torch(item.context_expr) for item in node.items):
            self._guard(node.body)
        self.generic_visit(node)

    def _guard(self, body: list[ast.stmt]) -> None:
        """Notes a block whose exceptions may be caught."""
        self.guarded.append((body[0].lineno, body[-1].end_lineno or 0))

    def _condition(self, node: ast.If | ast.Assert, passing: bool | None) -> None:
        """Notes one, and what it has to be."""
        found = tuple(_parts(node.test)) if passing is not None else ()
        parts = tuple(None if as_it is None else passing is as_it for _, as_it in found)
        places = tuple(_Place.of(part) for part, _ in found)
        self.checks.append(_Check(_Place.of(node), _Place.of(node.test), parts, places))


def _is_of_torch(context: ast.expr) -> bool:
    """Whether it is written as a call of torch's, `torch.no_grad()`."""
    while isinstance(context, ast.Call | ast.Attribute):
        context = context.func if isinstance(context, ast.Call) else context.value
    return isinstance(context, ast.Name) and context.id == "torch"


def _leaves(node: ast.AST) -> bool:
    """Whether a block may be left by another way than its end or an exception."""
    ways = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(inner, ways) for inner in ast.walk(node))


def _raises(body: list[ast.stmt]) -> bool:
    """Whether a block does nothing but raise an exception, whose message it may prepare.

    An AttributeError is none: `hasattr` and `getattr` catch it.
    """
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    if "AttributeError" in ast.dump(body[-1]):
        return False
    return all(isinstance(statement, ast.Assign | ast.Expr) for statement in body[:-1])


def _parts(test: ast.expr) -> Iterator[tuple[ast.expr, bool | None]]:
    """Every part whose truth is asked, and whether the whole holds as it does, or as it does not.

    None for what chooses within an expression.
    """
    match test:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            for part, as_it in _parts(operand):
                yield part, None if as_it is None else not as_it
        case _:
            chooses = (ast.BoolOp, ast.IfExp, ast.Not, ast.NamedExpr, ast.Lambda)
            yield (
                test,
                None if any(isinstance(inner, chooses) for inner in ast.walk(test)) else True,
            )


def _statements(file: str) -> _Statements:
    """Those of a file as it is; none for one that cannot be read."""
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@cache
def _parsed(source: str) -> _Statements:
    found = _Statements()
    with contextlib.suppress(SyntaxError, ValueError):
        found.visit(ast.parse(source))
    return found
