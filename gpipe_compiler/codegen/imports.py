"""The imports of one emitted file: just those that its code needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

STANDARD = ("math", "operator")

_WIDTH = 88
"""Of an import; ruff without configuration would break longer ones."""


class Imports:
    """Collects what the code of one file refers to."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._from_torch: set[str] = set()
        self._functional = False
        self._checkpoint = False
        self._any = False
        self._require = False
        self._libraries: dict[str, str] = {}
        self._layers: set[str] = set()
        self._own: set[str] = set()

    def torch(self) -> None:
        """`import torch`."""
        self._modules.add("torch")

    def functional(self) -> None:
        """`import torch.nn.functional as F`."""
        self._functional = True

    def checkpoint(self) -> None:
        """`from torch.utils.checkpoint import checkpoint`."""
        self._checkpoint = True

    def any_type(self) -> None:
        """`from typing import Any`."""
        self._any = True

    def require(self) -> None:
        """`from .runtime.core.required import require`."""
        self._require = True

    def from_torch(self, name: str) -> None:
        """`from torch import name`."""
        self._from_torch.add(name)

    def module(self, name: str) -> None:
        """`import name`."""
        self._modules.add(name)

    def library(self, module: str, namespace: str) -> None:
        """Imports a module for the operators it registers under `torch.ops.<namespace>`."""
        self._libraries[module] = namespace

    def layer(self, name: str) -> None:
        """`from .layers import name`, a class or function that several stages have."""
        self._layers.add(name)

    def own(self, module: str) -> str:
        """Imports a module, or `.own_model` of the package; returns how it is called."""
        if module.startswith("."):
            self._own.add(module[1:])
        else:
            self._modules.add(module)
        return module.removeprefix(".")

    def lines(self) -> list[str]:
        """The import block, sorted as isort would sort it."""
        standard = sorted(module for module in self._modules if module in STANDARD)
        others = sorted(module for module in self._modules if module not in STANDARD)
        third = [f"import {module}" for module in others]
        if self._functional:
            third.append("import torch.nn.functional as F")
        registering = [
            (module, f"  # noqa: F401  (registers torch.ops.{namespace})")
            for module, namespace in sorted(self._libraries.items())
            if module.removeprefix(".") not in self._modules | self._own
        ]
        third.extend(f"import {m}{note}" for m, note in registering if not m.startswith("."))
        third.sort(key=lambda line: line.split()[1])
        if self._from_torch:
            third.append(f"from torch import {', '.join(sorted(self._from_torch, key=_order))}")
        if self._checkpoint:
            third.append("from torch.utils.checkpoint import checkpoint")
        own = [f"from . import {m[1:]}{note}" for m, note in registering if m.startswith(".")]
        own += from_lines(".", sorted(self._own)) if self._own else []
        own += from_lines(".layers", sorted(self._layers, key=_order)) if self._layers else []
        if self._require:
            own.append("from .runtime.core.required import require")
        first = [f"import {module}" for module in standard]
        return _blocks(first + ["from typing import Any"] * self._any, third, own)


def from_lines(origin: str, names: Sequence[str]) -> list[str]:
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


def _blocks(*blocks: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for block in map(list, blocks):
        if block:
            lines.extend(([""] if lines else []) + block)
    return lines
