"""The example files, loaded as the user's own programs: by path, outside any package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Load `examples/<name>.py`; its neighbours can be imported, as under `python <file>`."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load
