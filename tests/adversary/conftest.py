"""Makes the cases importable as `adversary.models.attention`, and keeps one judge at work."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gpipe_compiler.runtime.train.command  # noqa: F401  # the runtime, whole

_package = ModuleType("adversary")
_package.__path__ = [str(Path(__file__).parent)]
sys.modules.setdefault("adversary", _package)

from adversary.judging import JudgeProcess  # noqa: E402  # importable from here on


@pytest.fixture(scope="session")
def judge():
    """The process that holds packages against plain PyTorch."""
    with JudgeProcess() as process:
        yield process


@pytest.fixture
def validating(in_process, monkeypatch):
    """Lets validation run here, on the compiler's own runtime: importing copies takes long."""
    validate = importlib.import_module("gpipe_compiler.validate.package")
    check = validate.run_check
    runtime = "gpipe_compiler.runtime"

    def shared(directory: Path, *arguments, **options) -> None:
        (name,) = re.findall(r'^NAME = "(.*)"$', (directory / "run.py").read_text(), re.MULTILINE)
        lent = {
            f"{name}{loaded.removeprefix('gpipe_compiler')}": module
            for loaded, module in sys.modules.items()
            if loaded == runtime or loaded.startswith(f"{runtime}.")
        }
        sys.modules.update(lent)
        try:
            check(directory, *arguments, **options)
        finally:
            for module in lent:
                sys.modules.pop(module, None)

    monkeypatch.setattr(validate, "run_check", shared)
