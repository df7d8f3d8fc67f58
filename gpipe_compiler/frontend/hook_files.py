"""The files that a package takes along for its hooks: the user's own, and those that it imports."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gpipe_compiler.frontend.own_code import is_installed
from gpipe_compiler.frontend.subject import Hooks


@dataclass(frozen=True, slots=True)
class HookFiles:
    """What of the user's program goes into a package.

    Attributes:
        files: by their paths in the folder of the package that is importable.
        notes: what is not taken along, though it may be needed, in words.
    """

    files: dict[PurePosixPath, Path]
    notes: tuple[str, ...]


_OWN = __name__.partition(".")[0]


class _CannotTravelError(Exception):
    """Which part of the user's program cannot be copied, and why."""


def hook_files(hooks: Hooks) -> HookFiles | str:
    """The files that run where the hooks run; why there are none, where one cannot be copied.

    Files are taken whole, so that what they do as they are imported is done there too. What is
    installed is left to whoever runs the package; what is imported by a name that is made up as the
    program runs is not found.
    """
    found = _Collected()
    try:
        if hooks.file is not None:
            found.take(PurePosixPath(hooks.file.name), hooks.file, "")
        elif not is_installed(hooks.module):
            found.take_module(hooks.module, hooks.module)
    except _CannotTravelError as error:
        return str(error)
    return HookFiles(found.files, tuple(found.notes))


@dataclass
class _Collected:
    files: dict[PurePosixPath, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def take(self, place: PurePosixPath, file: Path, package: str) -> None:
        """Takes a file, and all that it imports.

        Args:
            package: that relative imports in it start from.
        """
        if self.files.setdefault(place, file) != file:
            raise _CannotTravelError(f"{self.files[place]} and {file} would both be {place}")
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise _CannotTravelError(f"{file} cannot be read: {error}") from error
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "__file__":
                self.notes.append(
                    f"{file.name} asks for __file__ in line {node.lineno}: other files that it "
                    "finds by it are not in the package"
                )
            if isinstance(node, ast.Call) and _is_import(node) and not _literal_import(node):
                self.notes.append(
                    f"{file.name} imports in line {node.lineno} by a name that is made up as it "
                    "runs: where that is a file of yours, it is not in the package"
                )
            for module in _imported(node, package):
                self.take_module(module, f"{file.name}, line {getattr(node, 'lineno', 1)}")

    def take_module(self, module: str, where: str) -> None:
        """Takes a module with the packages that it is in, unless it is installed or not there."""
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name in self.seen:
                continue
            self.seen.add(name)
            if parts[0] == _OWN or is_installed(name) or (origin := _origin(name)) is None:
                continue
            if origin.suffix != ".py" or not origin.is_file():
                raise _CannotTravelError(f"{where}: {name} is {origin}, no file of Python's source")
            place = PurePosixPath(*parts[:count])
            is_package = origin.name == "__init__.py"
            place = place / "__init__.py" if is_package else place.with_suffix(".py")
            self.take(place, origin, name if is_package else name.rpartition(".")[0])


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """The modules that a statement may import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        try:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        except ImportError:  # outside of any package: that line cannot run
            return
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    elif isinstance(node, ast.Call) and _is_import(node):
        with contextlib.suppress(ImportError):  # outside of any package, as above
            literal = _literal_import(node)
            yield from [importlib.util.resolve_name(literal, package)] if literal else []


def _is_import(call: ast.Call) -> bool:
    """Whether it is `importlib.import_module(...)`, `import_module(...)` or `__import__(...)`."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else None
    called = call.func.id if isinstance(call.func, ast.Name) else called
    return called in ("import_module", "__import__")


def _literal_import(call: ast.Call) -> str:
    """The name that such a call is given, where it is written out."""
    first = call.args[0] if call.args else None
    written = first.value if isinstance(first, ast.Constant) else None
    return written if isinstance(written, str) else ""


def _origin(module: str) -> Path | None:
    """The file of a module that is not installed; None where there is none."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
        return Path(origin) if origin else None
    with contextlib.suppress(Exception):  # whatever importing the packages around it raises
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.has_location and spec.origin:
            return Path(spec.origin)
    return None
