"""Imports emitted packages, and scripts, from wherever they lie."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from pathlib import Path
from types import ModuleType


def load_package(directory: Path, name: str = "") -> ModuleType:
    """The package in a folder, as its run.py loads it.

    Args:
        name: under which it is imported; one that no other has, unless given.
    """
    return _load(directory / "__init__.py", name or f"package_{uuid.uuid4().hex}", [str(directory)])


def load_script(file: Path, name: str = "") -> ModuleType:
    """A file of Python that lies in no package, as a module.

    pytest's importlib mode puts no folder of tests on sys.path: files beside a test are such, too.
    """
    return _load(file, name or f"script_{uuid.uuid4().hex}", None)


def _load(file: Path, name: str, places: list[str] | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
