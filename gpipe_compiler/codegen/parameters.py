"""What a user's forward calls the values that it is given: the names of its parameters.

The graph knows values, and not what they are called where a module is given them. So the statements
that read a value are looked at: the one parameter that a statement reads is the one value that its
ops are given from outside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from gpipe_compiler.codegen.sources import parsed
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Graph, Op, ValueKind
from gpipe_compiler.ir.blocks import BlockCall


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
