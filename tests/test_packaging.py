"""What is installed is what lies on disk, under one name, and what is public is where it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from types import ModuleType

import grimp
import pytest

import gpipe_compiler.runtime
from gpipe_compiler.codegen.package import copy_runtime

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = ("passes", "templates")
"""Real folders at the top of the repository, installed inside the package."""


def package_folders() -> dict[str, Path]:
    """Every Python package on disk under the name it is installed as."""
    tops = {"gpipe_compiler": ROOT / "gpipe_compiler"}
    tops |= {f"gpipe_compiler.{name}": ROOT / name for name in LINKS}
    found = {}
    for name, top in tops.items():
        for folder, _, files in os.walk(top, followlinks=False):
            if any(file.endswith(".py") for file in files):
                parts = Path(folder).relative_to(top).parts
                found[".".join((name, *parts))] = Path(folder)
    return found


def installed_files() -> set[str]:
    """Paths, inside a wheel, of all that is to be installed."""
    return {
        str(PurePosixPath(*package.split("."), file.name))
        for package, folder in package_folders().items()
        for file in folder.iterdir()
        if file.suffix in {".py", ".jinja", ".md"} or file.name == "py.typed"
    }


def python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run a Python that sees what is installed, and `path`, but no working directory."""
    result = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(path) if path else ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of the tree, and the wheel that follows from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    copy = shutil.copytree(
        ROOT,
        folder / "tree",
        symlinks=True,
        ignore=shutil.ignore_patterns(".*", "*.egg-info", "*_x[0-9]*", "build", "dist"),
    )
    build = "import setuptools.build_meta as build, sys; build.build_{}(sys.argv[1])"
    python("-c", build.format("sdist"), str(folder), cwd=copy)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.0 to 3.11.3 knows no filters
            archive.extractall(folder / "sdist", filter="data")
        else:
            archive.extractall(folder / "sdist")
    (unpacked,) = (folder / "sdist").iterdir()
    python("-c", build.format("wheel"), str(folder), cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def test_the_list_of_packages_equals_the_folders_on_disk() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]

    assert sorted(package_folders()) == sorted(listed)


def test_every_package_has_an_init_file() -> None:
    assert [str(f) for f in package_folders().values() if not (f / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative(name: str) -> None:
    """An absolute link would lead to another checkout, or nowhere."""
    link = ROOT / "gpipe_compiler" / name

    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def test_the_wheel_holds_every_module_and_template_and_nothing_else(
    built: tuple[Path, Path],
) -> None:
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert installed_files() == names


def test_the_sdist_holds_the_folders_that_the_links_lead_to(built: tuple[Path, Path]) -> None:
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {str(PurePosixPath(*PurePosixPath(n).parts[1:])) for n in archive.getnames()}
    expected = {
        str(file.relative_to(ROOT))
        for name in LINKS
        for file in (ROOT / name).iterdir()
        if file.suffix in {".py", ".jinja"}
    }

    assert expected - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE"} - names == set()


def test_an_unpacked_wheel_imports_and_finds_its_templates(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    listing = python(
        "-c",
        "import gpipe_compiler, jinja2, importlib.util as u\n"
        "print(gpipe_compiler.__file__)\n"
        "print(*jinja2.PackageLoader('gpipe_compiler.templates', '').list_templates())",
        cwd=tmp_path,
        path=tmp_path,
    )
    origin, templates = listing.splitlines()
    expected = {file.name for file in (ROOT / "templates").glob("*.jinja")}

    assert Path(origin).is_relative_to(tmp_path)
    assert expected == {name for name in templates.split() if name.endswith(".jinja")}


@pytest.mark.parametrize("name", LINKS)
def test_no_global_module_of_the_links_names_is_installed(name: str, tmp_path: Path) -> None:
    spec = python("-c", f"import importlib.util as u; print(u.find_spec('{name}'))", cwd=tmp_path)

    assert spec.strip() == "None"


def test_console_scripts_lead_to_functions() -> None:
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    for name, target in PYPROJECT["project"]["scripts"].items():
        assert scripts[name].value == target
        assert callable(scripts[name].load())


def test_constraints_pin_every_dependency_exactly() -> None:
    """`make demo` on two days, or two machines, installs the same."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    project = PYPROJECT["project"]
    required = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        required.extend(extra)
    names = {name_of(text) for text in required} - {"gpipe-compiler"}

    assert [pin for pin in pins if pin.count("==") != 1 or "/" in pin] == []
    assert names - {pin.split("==")[0] for pin in pins} == set()


def name_of(requirement: str) -> str:
    """The name in `name>=1`, `name[extra]`."""
    return requirement.split(">")[0].split("[")[0].strip()


def modules() -> Iterator[ModuleType]:
    """Every module of the package but the one that runs when imported."""
    yield gpipe_compiler
    for found in pkgutil.walk_packages(gpipe_compiler.__path__, "gpipe_compiler."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_every_public_name_exists_and_says_where_it_lives() -> None:
    """`__all__` names things of this package, and their `__module__` leads back to them.

    `gpipe_compiler.plan` is a function and a module; the modules are found by their full names.
    """
    misplaced = []
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name, None)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            if value.__module__ == "typing":  # an alias, such as `Argument = Any`
                continue
            home = sys.modules.get(value.__module__)
            if not value.__module__.startswith("gpipe_compiler") or (
                getattr(home, value.__name__, None) is not value
            ):
                misplaced.append(f"{module.__name__}.{name} ({value.__module__})")

    assert misplaced == []


def test_the_top_of_the_package_shows_nothing_by_accident() -> None:
    """Beside `__all__` and the modules below it, no name without an underscore."""
    code = (
        "import gpipe_compiler as g, types\n"
        "print(*(n for n, v in vars(g).items() if not n.startswith('_')\n"
        "        and n not in g.__all__ and n != 'annotations'\n"
        "        and not isinstance(v, types.ModuleType)))"
    )

    assert python("-c", code, cwd=ROOT.parent).split() == []


def test_no_public_name_is_taken_from_a_module_that_only_imports_it() -> None:
    """`from gpipe_compiler.x import y` names the module that defines y, or its package."""
    wrong = []
    for module in modules():
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            if not node.module.startswith("gpipe_compiler"):
                continue
            source = importlib.import_module(node.module)
            for alias in node.names:
                value = getattr(source, alias.name, None)
                home = getattr(value, "__module__", None) or ""
                # A type alias is of `typing` or `builtins`, wherever it is written.
                if not home.startswith("gpipe_compiler") or not callable(value):
                    continue
                if home != node.module and alias.name not in getattr(source, "__all__", ()):
                    wrong.append(f"{module.__name__}: {node.module}.{alias.name} is of {home}")

    assert wrong == []


def test_the_runtime_imports_torch_safetensors_and_the_standard_library_only() -> None:
    """It is copied into every package, where nothing else can be counted on."""
    allowed = sys.stdlib_module_names | {
        "torch",
        "safetensors",
        "fsspec",
    }  # torch requires the last
    wrong = []
    for file in (ROOT / "gpipe_compiler" / "runtime").rglob("*.py"):
        depth = len(file.relative_to(ROOT / "gpipe_compiler" / "runtime").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            elif isinstance(node, ast.ImportFrom) and node.level > depth:
                wrong.append(f"{file}:{node.lineno} leaves the runtime")
            wrong.extend(f"{file}: {n}" for n in names if n.split(".")[0] not in allowed)

    assert wrong == []


def test_the_runtime_of_a_package_imports_one_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the contract that `make lint` holds the compiler's own to."""
    (contract,) = (
        found
        for found in PYPROJECT["tool"]["importlinter"]["contracts"]
        if "gpipe_compiler.runtime" in found["containers"]
    )
    (tmp_path / "copied_x2").mkdir()
    (tmp_path / "copied_x2" / "__init__.py").touch()
    copy_runtime(gpipe_compiler.runtime, tmp_path / "copied_x2" / "runtime")
    monkeypatch.syspath_prepend(tmp_path)
    imports = grimp.build_graph("copied_x2", exclude_type_checking_imports=True, cache_dir=None)
    layers = [grimp.Layer(*layer.split(" | ")) for layer in contract["layers"]]

    assert {module for layer in layers for module in layer.module_tails} == {
        child.removeprefix("copied_x2.runtime.")
        for child in imports.find_children("copied_x2.runtime")
    }
    assert not imports.find_illegal_dependencies_for_layers(layers, {"copied_x2.runtime"})
