"""The user's statements: which names they assign to, and how much they compute."""

from __future__ import annotations

import ast
import linecache
import sys
from dataclasses import dataclass
from functools import cache

from gpipe_compiler.errors import SourceLocation

_SHAPE_ATTRIBUTES = frozenset({"shape", "T", "mT", "H", "real", "imag", "ndim", "dtype", "device"})


@dataclass(frozen=True, slots=True)
class UserStatement:
    """One statement of the user's program.

    Attributes:
        targets: the names it assigns to; empty where it assigns to none, or to anything else.
        operations: calls, operators and subscripts in it; ops beyond that number come from inside
            the functions it calls. No limit for a comprehension.
        names_size: whether what it assigns is the size of a tensor.
        rebinds: whether it computes what it assigns from what the same name held before.
        listed: whether what it assigns is computed item by item, in the order of the targets.
        function: of the function whose result it returns, the name; "" where it returns nothing.
    """

    file: str
    line: int
    targets: tuple[str, ...]
    operations: int
    names_size: bool = False
    rebinds: bool = False
    listed: bool = False
    function: str = ""


def statement_at(location: SourceLocation | None) -> UserStatement | None:
    """The statement that a line belongs to; None where the source cannot be read."""
    if location is None:
        return None
    return _statements(location.file).get(location.line)


@cache
def parsed(file: str) -> ast.Module:
    """A file of the user's; empty where it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@cache
def _statements(file: str) -> dict[int, UserStatement]:
    """The simple statements of a file by each line they cover."""
    tree = parsed(file)
    functions: dict[ast.AST, str] = {
        part: function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for part in ast.walk(function)
        if isinstance(part, ast.Return)
    }
    table: dict[int, UserStatement] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
            targets = _targets(node)
            statement = UserStatement(
                file,
                node.lineno,
                targets,
                _operations(node),
                _names_size(node),
                isinstance(node, ast.AugAssign) or not _read(node).isdisjoint(targets),
                _is_listed(getattr(node, "value", None)),
                functions.get(node, ""),
            )
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                table[line] = statement
    return table


def _targets(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return (name,)
        case ast.Assign(targets=[ast.Tuple(elts=elements)]):
            names = [item.id for item in elements if isinstance(item, ast.Name)]
            return tuple(names) if len(names) == len(elements) else ()
        case ast.AugAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case _:
            return ()


def _read(node: ast.stmt) -> set[str]:
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {item.id for item in names if isinstance(item.ctx, ast.Load)}


def _operations(node: ast.stmt) -> int:
    if any(isinstance(part, ast.comprehension) for part in ast.walk(node)):
        return sys.maxsize
    counted = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.AugAssign)
    return sum(
        isinstance(part, counted)
        or (isinstance(part, ast.Attribute) and part.attr in _SHAPE_ATTRIBUTES)
        for part in ast.walk(node)
    )


def _is_listed(value: ast.expr | None) -> bool:
    """Whether it is `f(x), g(y)` or `(f(x) for f in functions)`."""
    match value:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return not any(isinstance(item, ast.Name | ast.Constant) for item in elements)
        case _:
            return isinstance(value, ast.GeneratorExp | ast.ListComp)


def _names_size(node: ast.stmt) -> bool:
    """Whether it is `b = x.shape[0]`, `b, c = x.shape`, `b = x.size(0)` or the like."""
    value = getattr(node, "value", None)
    return any(map(_is_size, value.elts if isinstance(value, ast.Tuple) else (value,)))


def _is_size(expression: ast.expr | None) -> bool:
    match expression:
        case ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size")):
            return True
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Subscript(value=value):
            return _is_size(value)
        case _:
            return False
