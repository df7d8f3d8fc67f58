"""The user's statements: which names they assign to, and how much they compute."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Graph, Op, ValueKind
from gpipe_compiler.ir.blocks import BlockCall

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


@dataclass(frozen=True, eq=False)
class _Place:
    """A statement of a method of the user's."""

    method: ast.FunctionDef
    statement: ast.stmt

    @property
    def read(self) -> set[str]:
        """The parameters that the statement reads."""
        return {own for own in _names(self.statement, ast.Load) if self.holds(own, self.statement)}

    def holds(self, own: str, node: ast.stmt | ast.expr) -> bool:
        """Whether a name is a parameter's, of which nothing else has been made before a node."""
        arguments = self.method.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if own not in [argument.arg for argument in every[1:]]:
            return False
        loops = (part for part in ast.walk(self.method) if isinstance(part, ast.For | ast.While))
        around = [part for part in loops if any(inner is node for inner in ast.walk(part))]
        start = min((part.end_lineno or 0 for part in around), default=node.lineno - 1)
        return not any(
            part.id == own and isinstance(part.ctx, ast.Store) and part.lineno <= start
            for part in ast.walk(self.method)
            if isinstance(part, ast.Name)
        )


def parameter_names(graph: Graph, call: BlockCall) -> dict[str, str]:
    """The user's names for values that a call of a module is given, where they can be told."""
    given = {value for value in call.inputs if _is_tensor(graph, value)}
    found: dict[str, str] = {}
    places: dict[int, tuple[_Place, set[str]]] = {}
    for part in call.parts:
        place = _place(part.source) if isinstance(part, Op) else None
        if place is not None:
            read = places.setdefault(id(place.statement), (place, set()))[1]
            read.update(given.intersection(part.inputs))
    for place, values in places.values():
        _match(place.read, values, found)
    if places:
        method = next(iter(places.values()))[0].method
        for part in call.parts:
            if isinstance(part, BlockCall):
                inner = part.path.removeprefix(f"{call.path}.")
                _match(_passed(method, inner), given.intersection(part.inputs), found)
    return found


def _match(names: set[str], values: set[str], found: dict[str, str]) -> None:
    if len(names) == len(values) == 1:
        (own,) = names
        if own not in found.values():
            found.setdefault(next(iter(values)), own)


def _is_tensor(graph: Graph, value: str) -> bool:
    known = graph.values.get(value)
    return known is not None and known.kind is ValueKind.TENSOR


def _passed(method: ast.FunctionDef, inner: str) -> set[str]:
    """The parameters of a method that it passes to a module of its own, called once."""
    calls = [
        part
        for part in ast.walk(method)
        if isinstance(part, ast.Call) and ast.unparse(part.func) == f"self.{inner}"
    ]
    if len(calls) != 1:
        return set()
    (made,) = calls
    place = _Place(method, ast.Expr(made))
    values = (*made.args, *(keyword.value for keyword in made.keywords))
    own = (value.id for value in values if isinstance(value, ast.Name))
    return {word for word in own if place.holds(word, made)}


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, context):
            yield part.id


def _place(source: SourceLocation | None) -> _Place | None:
    return None if source is None else _places(source.file).get(source.line)


@cache
def _places(file: str) -> Mapping[int, _Place]:
    """The statements of the methods of a file by each line they cover."""
    table: dict[int, _Place] = {}
    for method in ast.walk(parsed(file)):
        if not isinstance(method, ast.FunctionDef) or not method.args.args:
            continue
        if method.args.args[0].arg != "self":
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                table.update(dict.fromkeys(lines, _Place(method, node)))
    return table
