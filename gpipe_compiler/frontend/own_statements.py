"""The statements of a file of the user's: which of them bind a name, and which register for an
operator."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

TORCHS_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "quantized", "_c10d_functional", "profiler", "mkldnn"}
)
"""Of the operators that come with torch."""


class UnwritableError(Exception):
    """Why something cannot be written into a package; the caller knows where it stands."""


@dataclass(frozen=True)
class UsersFile:
    """A file of the user's.

    Attributes:
        body: the statements of its top level.
        bound: those that bind a name.
        values: what its names stand for.
        future: its `from __future__` imports.
    """

    name: str
    file: str
    package: str
    lines: list[str]
    body: list[ast.stmt]
    bound: Mapping[str, list[ast.stmt]]
    values: Mapping[str, Any]
    future: str

    @classmethod
    def of(cls, module: ModuleType) -> UsersFile:
        """That of a module.

        Raises:
            UnwritableError: where it cannot be read.
        """
        file = inspect.getsourcefile(module)
        try:
            text = Path(file or "").read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError) as error:
            raise UnwritableError(f"the source of {module.__name__} cannot be read") from error
        package = module.__package__ or module.__name__.rpartition(".")[0]
        bound: dict[str, list[ast.stmt]] = {}
        future = ""
        for statement in (_named(item, package) for item in tree.body):
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                future = ast.unparse(statement)
                continue
            if _is_of_the_script(statement):
                continue
            for name in dict.fromkeys(bound_by(statement)):
                bound.setdefault(name, []).append(statement)
        lines = text.splitlines()
        name, values = module.__name__, vars(module)
        return cls(name, file or "", package, lines, tree.body, bound, values, future)

    def text(self, statement: ast.stmt) -> str:
        """A statement as it stands, decorators included."""
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(item.lineno for item in decorators)])
        return "\n".join(self.lines[first - 1 : statement.end_lineno]) + "\n"

    def hold_to_its_value(self, name: str, statement: ast.stmt) -> None:
        """Refuses a constant that is another one by now."""
        match statement:
            case ast.Assign(targets=[ast.Name(), *_], value=written):
                pass
            case ast.AnnAssign(value=ast.expr() as written):
                pass
            case _:
                return
        if len(self.bound[name]) > 1:
            return
        try:
            value = ast.literal_eval(written)
        except ValueError:
            return
        if self.values.get(name) != value:
            raise UnwritableError(f"it uses {name}, which is not what line {statement.lineno} says")


def _named(statement: ast.stmt, package: str) -> ast.stmt:
    """`from x import *` with the names that it binds, other statements as they are."""
    match statement:
        case ast.ImportFrom(module=module, names=[ast.alias(name="*")], level=level):
            origin = importlib.util.resolve_name("." * level + (module or ""), package)
            values = vars(sys.modules[origin]) if origin in sys.modules else {}
            public = [name for name in values if not name.startswith("_")]
            aliases = [ast.alias(name) for name in values.get("__all__", public)]
            return ast.copy_location(ast.ImportFrom(module, aliases, level), statement)
        case _:
            return statement


def bound_by(statement: ast.AST) -> Iterator[str]:
    """The names that a statement binds outside of functions and classes."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Lambda():
            return
        case _:
            for child in ast.iter_child_nodes(statement):
                yield from bound_by(child)


def _is_of_the_script(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__"`."""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def registers(statement: ast.stmt, names: Collection[str], *, alone: bool) -> bool:
    """Whether a statement adds to an operator, called or written in text by one of its names.

    Args:
        alone: an expression does so whatever it calls, as it stands in the operator's own file.
    """
    parts: list[ast.AST] = [statement]
    match statement:
        case ast.FunctionDef(decorator_list=decorators) | ast.ClassDef(decorator_list=decorators):
            parts, alone = [*decorators], True
        case ast.Expr():
            pass
        case ast.Import() | ast.ImportFrom() | ast.AsyncFunctionDef():
            return False
        case _:
            parts, alone = [] if _is_of_the_script(statement) else parts, False
    nodes = [node for part in parts for node in ast.walk(part)]
    called = {node.id for node in nodes if isinstance(node, ast.Name)}
    called.update(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    verbs = [getattr(node, "attr", getattr(node, "id", "")) for node in nodes]
    return not called.isdisjoint(names) and (
        alone or any(verb.startswith(("register_", "impl", "define")) for verb in verbs)
    )


def defines(statement: ast.stmt, qualname: str) -> bool:
    """Whether a statement defines an operator in text."""
    texts = [n.value for n in ast.walk(statement) if isinstance(n, ast.Constant)]
    name = qualname.partition("::")[2]
    return "define" in ast.unparse(statement) and any(
        isinstance(text, str) and (text == qualname or re.match(rf"{name}(\.\w+)?\s*\(", text))
        for text in texts
    )


def operators_called(text: str) -> set[str]:
    """The operators that a statement calls by torch.ops, but for torch's own."""
    return {
        f"{namespace}::{name}"
        for node in ast.walk(ast.parse(text))
        for namespace, name in re.findall(
            r"\bops\.(\w+)\.(\w+)$", ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        )
        if namespace not in TORCHS_NAMESPACES
    }


def names_read(text: str, file: str) -> set[str]:
    """The names that a statement of a module takes from elsewhere in it."""
    found: set[str] = set()
    pending = [symtable.symtable(text, file, "exec")]
    while pending:
        table = pending.pop()
        outer = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (outer or symbol.is_global()):
                found.add(symbol.get_name())
        pending.extend(table.get_children())
    return found
