"""Imports emitted packages from wherever they lie."""

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
    spec = importlib.util.spec_from_file_location(
        name or f"package_{uuid.uuid4().hex}",
        directory / "__init__.py",
        submodule_search_locations=[str(directory)],
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
