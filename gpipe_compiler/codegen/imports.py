"""The imports of one emitted file: just those that its code needs."""

from __future__ import annotations

import re
from collections.abc import Sequence

STANDARD = ("math", "operator", "typing")

_WIDTH = 88
"""Of an import; ruff without configuration would break longer ones."""


class Imports:
    """Collects what the code of one file refers to."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._names: dict[str, set[str]] = {}
        self._libraries: dict[str, str] = {}

    def module(self, module: str) -> None:
        """`import module`."""
        self._modules.add(module)

    def name(self, origin: str, *names: str) -> None:
        """`from origin import names`."""
        self._names.setdefault(origin, set()).update(names)

    def library(self, module: str, namespace: str) -> None:
        """Imports a module for the operators it registers under `torch.ops.<namespace>`."""
        self._libraries[module] = namespace

    def own(self, module: str) -> str:
        """Imports a module, or `.own_model` of the package; returns how it is called."""
        if module.startswith("."):
            self.name(".", module[1:])
        else:
            self.module(module)
        return module.removeprefix(".")

    def lines(self) -> list[str]:
        """The import block, sorted as isort would sort it."""
        found = [(_section(module), f"import {module}") for module in self._modules]
        known = self._modules | self._names.get(".", set())
        for module, namespace in self._libraries.items():
            if module.removeprefix(".") not in known:
                own = f"from . import {module[1:]}" if module[0] == "." else f"import {module}"
                note = f"  # noqa: F401  (registers torch.ops.{namespace})"
                found.append((_section(module), own + note))
        # What is imported whole comes first in each section.
        found.sort(key=lambda item: item[1].split())
        for origin, names in sorted(self._names.items()):
            lines = _from_lines(origin, sorted(names, key=_order))
            found.extend((_section(origin), line) for line in lines)
        sections = ([line for own, line in found if own == number] for number in range(3))
        blocks = ["\n".join(lines) for lines in sections if lines]
        return "\n\n".join(blocks).splitlines()


def _section(module: str) -> int:
    """Of Python's own modules 0, of those that are installed 1, of those of the package 2."""
    return 0 if module in STANDARD else 2 if module.startswith(".") else 1


def _from_lines(origin: str, names: Sequence[str]) -> list[str]:
    """`from origin import ...`, on a line if it fits."""
    flat = f"from {origin} import {', '.join(names)}"
    if len(flat) <= _WIDTH:
        return [flat]
    return [f"from {origin} import (", *(f"    {item}," for item in names), ")"]


def _order(name: str) -> tuple[int, list[str | int], str]:
    """As isort has it: constants, classes, functions; in each `Block2` before `block10`."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[0].isupper() else 2
    words = re.split(r"(\d+)", name.lower())
    return kind, [int(word) if word.isdecimal() else word for word in words], name
