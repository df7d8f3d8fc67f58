"""Names for the values of a graph: readable, valid in emitted code, unique."""

from __future__ import annotations

import builtins
import keyword
import re

_TAKEN = frozenset(
    {
        *dir(builtins),
        *keyword.kwlist,
        *keyword.softkwlist,
        *("self", "torch", "nn", "F", "math", "operator", "forward", "training"),
    }
)
"""Words that mean something else where emitted code uses a value's name."""


def identifier(text: str, *, digit_prefix: str = "layer") -> str:
    """The text as a Python name: `layer1.0.conv1` gives `layer1_0_conv1`.

    Args:
        digit_prefix: what stands before a name that would begin with a digit.
    """
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    if not name:
        return "value"
    if name[0].isdigit():
        name = f"{digit_prefix}_{name}"
    return name


class Names:
    """Hands out every name once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, wish: str) -> str:
        """The wished name when it is free, otherwise the wish with a number: `add`, `add_1`."""
        stem = name = f"{wish}_" if wish in _TAKEN else wish
        number = self._next.get(stem, 0)
        while name in self._used:
            number += 1
            name = f"{stem}_{number}" if stem == wish else f"{stem}{number}"
        self._next[stem] = number
        self._used.add(name)
        return name
