"""The source of a class or operator of the user's, with all that it uses, for a package to hold.

Statements of the user's modules are taken as they stand. What they import of installed packages is
imported there too; what comes from other files of the user's is taken in the same way.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import inspect
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch._library.custom_ops import CustomOpDef

from gpipe_compiler.frontend.locate import is_installed_file, is_users
from gpipe_compiler.ir.own_functions import Written

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUTURE = -1
"""The line of `from __future__` imports, before all others."""

_REGISTERING = sys.maxsize
"""The line of the imports of files that register more for an operator, after all others."""

_ENCLOSED = 0
"""The line of what a class took from the function around it, after these."""


class UnwritableError(Exception):
    """Why something cannot be written into a package; the caller knows where it stands."""


def written(cls: type) -> Written:
    """Where a class stands for whoever runs a package.

    Raises:
        UnwritableError: where its source, or that of something it uses, cannot be found.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or getattr(module, "__file__", None) is None:
        raise UnwritableError(f"{cls.__name__} stands in no file")
    if is_installed(module.__name__):
        if getattr(module, cls.__qualname__, None) is not cls:
            raise UnwritableError(f"{cls.__name__} is made by a function of {module.__name__}")
        return Written(module.__name__)
    collected = _Collected()
    return collected.written(collected.take_class(cls, module))


@cache
def written_operator(operator: CustomOpDef) -> tuple[Written, str] | None:
    """Where an operator made by torch.library.custom_op stands, and the name it has there.

    None for an operator of a library.

    Raises:
        UnwritableError: as `written`.
    """
    made_in = operator._init_fn.__module__
    standing = [module for module in _users_modules() if _names(operator, module)]
    if is_installed(made_in) and (_names(operator, sys.modules.get(made_in)) or not standing):
        return None
    if not standing:
        raise UnwritableError(f"no name of its module stands for the operator {operator._qualname}")
    home = next((module for module in standing if module.__name__ == made_in), standing[0])
    collected, file, name = _Collected(), file_of(home.__name__), _names(operator, home)[0]
    collected.take(name, _Module.of(home), file)
    return collected.written(file), name


def is_installed(module: str) -> bool:
    """Whether whoever runs a package can be expected to have a module: it is no file of theirs."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    installed = {Path(sysconfig.get_path(key)) for key in ("purelib", "platlib", "stdlib")}
    return any(
        is_installed_file(place) or any(Path(place).is_relative_to(home) for home in installed)
        for place in places
    )


def file_of(module: str) -> str:
    """The name of the file of a package that holds what comes from a module of the user's."""
    return f"own_{''.join(c if c.isalnum() else '_' for c in module).strip('_')}"


def _users_modules() -> list[ModuleType]:
    """What has been imported of the user's files."""
    installed = {
        root: is_installed(root) for root in {name.partition(".")[0] for name in sys.modules}
    }
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and not installed.get(name.partition(".")[0], True)
        and is_users(vars(module).get("__file__") or "<")
    ]


def _names(value: object, module: ModuleType | None) -> list[str]:
    """The names of a module that stand for a value."""
    return [name for name, found in vars(module).items() if found is value] if module else []


@dataclass
class _Collected:
    """Statements by the files that they go to and the lines that they come from."""

    files: dict[str, dict[int, str]] = field(default_factory=dict)
    whole: list[CustomOpDef] = field(default_factory=list)

    def take_class(self, cls: type, module: ModuleType) -> str:
        """Takes a class and what it uses; returns the file that it goes to."""
        home = _Module.of(module)
        if "." not in cls.__qualname__:
            file = file_of(module.__name__)
            self.take(cls.__name__, home, file)
            return file
        enclosed = _enclosed(cls)
        told = repr((cls.__qualname__, sorted(enclosed.items())))
        file = f"{file_of(module.__name__)}_{hashlib.sha256(told.encode()).hexdigest()[:6]}"
        try:
            lines, line = inspect.getsourcelines(cls)
        except (OSError, TypeError) as error:
            raise UnwritableError(f"the source of {cls.__name__} cannot be read") from error
        held = self._file(file, home)
        held[_ENCLOSED] = "\n".join(f"{name} = {value!r}" for name, value in enclosed.items())
        text = textwrap.dedent("".join(lines))
        held[line] = text
        self._take_used(text, home, file, enclosed)
        return file

    def written(self, file: str) -> Written:
        """What has been taken, as it stands for a package that imports `file`."""
        files = ((name, tuple(sorted(held.items()))) for name, held in self.files.items())
        return Written(f".{file}", tuple(files))

    def _take_registered(self, operator: CustomOpDef, file: str) -> None:
        """Takes what any file of the user's registers for an operator that `file` holds."""
        if operator in self.whole:
            return
        self.whole.append(operator)
        for module in _users_modules():
            names, own = _names(operator, module), file_of(module.__name__)
            try:
                mentioned = bool(names) or operator._qualname in inspect.getsource(module)
                home = _Module.of(module) if mentioned else None
            except (OSError, TypeError, UnwritableError):  # a library of compiled code
                home = None
            if home is None:
                continue
            for statement in home.body:
                if not _registers(statement, {*names, operator._qualname}, alone=own == file):
                    continue
                self._file(own, home)[statement.lineno] = text = home.text(statement)
                self._take_used(text, home, own)
                if own != file:
                    last = self.files[file].get(_REGISTERING, "").splitlines()
                    lines = dict.fromkeys([*last, f"from . import {own}"])
                    self.files[file][_REGISTERING] = "\n".join(lines)

    def _file(self, file: str, home: _Module) -> dict[int, str]:
        first = {_FUTURE: home.future} if home.future else {}
        return self.files.setdefault(file, first)

    def _take_used(self, text: str, home: _Module, file: str, known: Collection[str] = ()) -> None:
        """Takes what a statement uses, but for names that are known."""
        _refuse_inner_imports(text)
        for name in sorted(_read(text, home.file).difference(known)):
            self.take(name, home, file)

    def take(self, name: str, home: _Module, file: str) -> None:
        """Takes what a name of a module stands for; of an operator also what is registered."""
        operator, own = home.values.get(name), file_of(home.name)
        if not isinstance(operator, CustomOpDef) or name not in home.bound:
            self._take(name, home, file)
            return
        if file != own:  # Made twice, the second would stand without what is registered.
            line = home.bound[name][0].lineno
            self._file(file, home)[line] = f"from .{own} import {name}"
        self._take(name, home, own)
        self._take_registered(operator, own)

    def _take(self, name: str, home: _Module, file: str) -> None:
        held = self._file(file, home)
        if name not in home.bound:
            if hasattr(builtins, name) or name in ("__file__", "__name__"):
                return
            raise UnwritableError(f"it uses {name}, which {Path(home.file).name} does not define")
        for statement in home.bound[name]:
            line = statement.lineno
            if isinstance(statement, ast.Import | ast.ImportFrom):
                text = self._import(statement, name, home)
                held[line] = "\n".join(dict.fromkeys([*held.get(line, "").splitlines(), text]))
                continue
            if line in held:
                continue
            home.hold_to_its_value(name, statement)
            held[line] = text = home.text(statement)
            self._take_used(text, home, file)

    def _import(self, statement: ast.Import | ast.ImportFrom, name: str, home: _Module) -> str:
        """The import of one name."""
        found = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name]
        if isinstance(statement, ast.Import):
            for alias in found:  # several in `import torch, torch.nn`
                if not is_installed(alias.name):
                    raise UnwritableError(
                        f"it uses the module {alias.name}, which is not installed: import what it "
                        "uses of it by name"
                    )
            return ast.unparse(ast.Import(found))
        *_, alias = found
        origin = importlib.util.resolve_name(
            "." * statement.level + (statement.module or ""), home.package
        )
        if is_installed(origin):
            return ast.unparse(ast.ImportFrom(origin, [alias], 0))
        loaded = sys.modules.get(origin)
        if loaded is None or isinstance(getattr(loaded, alias.name, None), ModuleType):
            raise UnwritableError(f"it uses the module {alias.name}, which is not installed")
        file = file_of(origin)
        self.take(alias.name, _Module.of(loaded), file)
        return ast.unparse(ast.ImportFrom(file, [alias], 1))


@dataclass(frozen=True)
class _Module:
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
    def of(cls, module: ModuleType) -> _Module:
        file = inspect.getsourcefile(module)
        try:
            text = Path(file or "").read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError) as error:
            raise UnwritableError(f"the source of {module.__name__} cannot be read") from error
        bound: dict[str, list[ast.stmt]] = {}
        future = ""
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                future = ast.unparse(statement)
                continue
            if _is_of_the_script(statement):
                continue
            for name in dict.fromkeys(_bound(statement)):
                bound.setdefault(name, []).append(statement)
        package = module.__package__ or module.__name__.rpartition(".")[0]
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


def _bound(statement: ast.AST) -> Iterator[str]:
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
                yield from _bound(child)


def _is_of_the_script(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__"`."""
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _registers(statement: ast.stmt, names: Collection[str], *, alone: bool) -> bool:
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
        alone or any(verb.startswith(("register_", "impl_")) for verb in verbs)
    )


def _read(text: str, file: str) -> set[str]:
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


def _refuse_inner_imports(text: str) -> None:
    """Refuses a statement inside which something is imported that is not installed."""
    for node in ast.walk(ast.parse(text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            if module.startswith(".") or not is_installed(module):
                raise UnwritableError(
                    f"it imports {module}, which is not installed, where it is used: import what "
                    "it uses of it at the top of its file"
                )


def _enclosed(cls: type) -> dict[str, object]:
    """What the methods of a class take from the function that the class stands in."""
    found: dict[str, object] = {}
    for member in vars(cls).values():
        function = inspect.unwrap(getattr(member, "__func__", member))
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        for name, cell in zip(code.co_freevars if code else (), cells or (), strict=True):
            if name == "__class__":
                continue
            value = cell.cell_contents
            if not isinstance(value, _PLAIN):
                raise UnwritableError(
                    f"it takes {name} from the function around it, and that is no number or text"
                )
            found[name] = value
    return found
