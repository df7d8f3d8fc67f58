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
import sys
import sysconfig
import textwrap
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload
from torch.library import Library

from gpipe_compiler.frontend.locate import is_installed_file, is_users
from gpipe_compiler.frontend.own_statements import (
    UnwritableError,
    UsersFile,
    defines,
    names_read,
    operators_called,
    registers,
)
from gpipe_compiler.ir.own_functions import WrittenClass

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUTURE = -1
"""The line of `from __future__` imports, before all others."""

_REGISTERING = sys.maxsize
"""The line of the imports of files that register more for an operator, after all others."""

_ENCLOSED = 0
"""The line of what a class took from the function around it, after these."""


def written(cls: type) -> WrittenClass:
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
        return WrittenClass(module.__name__)
    collected = _Collected()
    return collected.written(collected.take_class(cls, module))


def written_operator(operator: OpOverload) -> tuple[WrittenClass, str] | None:
    """Where an operator that files of the user's define stands, and how it is called.

    By a name that it has there, or in full where it has none. None for one of a library.

    Raises:
        UnwritableError: as `written`.
    """
    qualname = operator._schema.name
    found = _collected_operator(qualname, OPDEFS.get(qualname), _users_modules())
    return found and (found[0], found[1] or f"torch.ops.{operator}")


@cache
def _collected_operator(
    qualname: str, definition: CustomOpDef | None, modules: tuple[ModuleType, ...]
) -> tuple[WrittenClass, str] | None:
    collected = _Collected(modules)
    found = collected.take_operator(qualname)
    return found and (collected.written(found[0]), found[1])


@cache
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


def _users_modules() -> tuple[ModuleType, ...]:
    """What has been imported of the user's files."""
    return tuple(
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and is_users(vars(module).get("__file__") or "<")
        and not is_installed(name.partition(".")[0])
    )


def _names(value: object, module: ModuleType | None) -> list[str]:
    """The names of a module that stand for a value."""
    return [name for name, found in vars(module).items() if found is value] if module else []


def _handles(qualname: str, module: ModuleType) -> set[str]:
    """The names of a module, and the text, by which something can be registered for an operator."""
    namespace = qualname.partition("::")[0]
    definition = OPDEFS.get(qualname)
    return {qualname} | {
        name
        for name, value in vars(module).items()
        if (isinstance(value, Library) and value.ns == namespace)
        or (definition is not None and value is definition)
    }


@dataclass
class _Collected:
    """Statements by the files that they go to and the lines that they come from."""

    modules: tuple[ModuleType, ...] = field(default_factory=_users_modules)
    files: dict[str, dict[int, str]] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)

    def take_class(self, cls: type, module: ModuleType) -> str:
        """Takes a class and what it uses; returns the file that it goes to."""
        home = UsersFile.of(module)
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

    def written(self, file: str) -> WrittenClass:
        """What has been taken, as it stands for a package that imports `file`."""
        files = ((name, tuple(sorted(held.items()))) for name, held in self.files.items())
        return WrittenClass(f".{file}", tuple(files))

    def take_operator(self, qualname: str) -> tuple[str, str] | None:
        """Takes an operator of the user's; returns the file that it goes to, and its name there.

        The name is empty for one that is defined in text; None is returned for one of a library.
        """
        definition = OPDEFS.get(qualname)
        if definition is None:
            for module in self.modules:
                if any(defines(statement, qualname) for statement in self._body(qualname, module)):
                    file = file_of(module.__name__)
                    self._file(file, UsersFile.of(module))
                    self._take_registered(qualname, file)
                    return file, ""
            return None
        made_in = definition._init_fn.__module__
        standing = [module for module in self.modules if _names(definition, module)]
        library = sys.modules.get(made_in) if is_installed(made_in) else None
        if library and (_names(definition, library) or not standing):
            return None
        if not standing:
            raise UnwritableError(f"no name of its module stands for the operator {qualname}")
        home = next((module for module in standing if module.__name__ == made_in), standing[0])
        file, name = file_of(home.__name__), _names(definition, home)[0]
        self.take(name, UsersFile.of(home), file)
        return file, name

    def _body(self, qualname: str, module: ModuleType) -> list[ast.stmt]:
        """The statements of a module that may say something of an operator."""
        try:
            text = inspect.getsource(module)
            mentioned = len(_handles(qualname, module)) > 1 or qualname in text
            return UsersFile.of(module).body if mentioned else []
        except (OSError, TypeError, UnwritableError):  # a library of compiled code
            return []

    def _take_registered(self, qualname: str, file: str) -> None:
        """Takes what any file of the user's registers for an operator that `file` holds."""
        if qualname in self.whole:
            return
        self.whole.append(qualname)
        for module in self.modules:
            own, handles = file_of(module.__name__), _handles(qualname, module)
            for statement in self._body(qualname, module):
                if not registers(statement, handles, alone=own == file):
                    continue
                home = UsersFile.of(module)
                self._file(own, home)[statement.lineno] = text = home.text(statement)
                self._take_used(text, home, own)
                self._import_last(own, file)

    def _import_last(self, own: str, file: str) -> None:
        """Has a file import another after all that it does."""
        if own != file:
            lines = dict.fromkeys([*self.files[file].get(_REGISTERING, "").splitlines()])
            self.files[file][_REGISTERING] = "\n".join({**lines, f"from . import {own}": None})

    def _file(self, file: str, home: UsersFile) -> dict[int, str]:
        first = {_FUTURE: home.future} if home.future else {}
        return self.files.setdefault(file, first)

    def _take_used(
        self, text: str, home: UsersFile, file: str, known: Collection[str] = ()
    ) -> None:
        """Takes what a statement uses, but for names that are known."""
        _refuse_inner_imports(text)
        for name in sorted(names_read(text, home.file).difference(known)):
            self.take(name, home, file)
        for qualname in sorted(operators_called(text)):
            taken = self.take_operator(qualname)
            if taken is not None:
                self._import_last(taken[0], file)

    def take(self, name: str, home: UsersFile, file: str) -> None:
        """Takes what a name of a module stands for; of an operator also what is registered."""
        operator, own = home.values.get(name), file_of(home.name)
        if not isinstance(operator, CustomOpDef) or name not in home.bound:
            self._take(name, home, file)
            return
        if file != own:  # Made twice, the second would stand without what is registered.
            line = home.bound[name][0].lineno
            self._file(file, home)[line] = f"from .{own} import {name}"
        self._take(name, home, own)
        self._take_registered(operator._qualname, own)

    def _take(self, name: str, home: UsersFile, file: str) -> None:
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

    def _import(self, statement: ast.Import | ast.ImportFrom, name: str, home: UsersFile) -> str:
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
        value = getattr(loaded, alias.name, None)
        if isinstance(value, ModuleType) and is_installed(value.__name__):
            as_name = None if value.__name__ == name else name
            return ast.unparse(ast.Import([ast.alias(value.__name__, as_name)]))
        if loaded is None or isinstance(value, ModuleType):
            raise UnwritableError(f"it uses the module {alias.name}, which is not installed")
        file = file_of(origin)
        self.take(alias.name, UsersFile.of(loaded), file)
        return ast.unparse(ast.ImportFrom(file, [alias], 1))


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
