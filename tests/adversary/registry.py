"""All cases, by the names of their files and their own: `attention.encoder`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path

from adversary.case import Case

MODELS = Path(__file__).with_name("models")


@functools.cache
def cases() -> Mapping[str, Case]:
    """The cases of every file in `models/`, in order."""
    found: dict[str, Case] = {}
    for file in sorted(MODELS.glob("*.py")):
        for case in importlib.import_module(f"adversary.models.{file.stem}").CASES:
            name = f"{file.stem}.{case.name}"
            assert name not in found, f"two cases are called {name}"
            found[name] = case
    return found


def lines_at_fault(name: str) -> list[str]:
    """The lines that are marked as those which a case may be refused for, as `file.py:12`."""
    file = MODELS / f"{name.partition('.')[0]}.py"
    mark = f"# refused: {name.partition('.')[2]}"
    lines = enumerate(file.read_text().splitlines(), 1)
    found = [f"{file.name}:{number}" for number, line in lines if line.endswith(mark)]
    assert found, f"no line of {file.name} ends in {mark!r}"
    return found
