"""Names that Python accepts, each given out once."""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
import unicodedata
from collections.abc import Iterable

MODULE_NAMES = frozenset(
    {"torch", "nn", "F", "math", "operator", "Tensor", "Any", "builtins", "checkpoint"}
)
"""What an emitted stage may import; no variable is called so."""

RESERVED = (
    MODULE_NAMES
    | frozenset(keyword.kwlist)
    | frozenset(dir(builtins))
    | {"self", "_", "l", "O", "I"}
) - {"input"}
"""Names that no variable or argument takes: they mean something else, or cannot be read. What a
layer is given may be its `input`, as in torch."""

LONGEST = 48
"""Characters; longer names lose their middle, so that statements fit on a line."""


def identifier(text: str) -> str:
    """`text` as an identifier: `layer1.0.conv1` becomes `layer1_0_conv1`.

    Not unique: `a.b` and `a_b` meet; `Identifiers` makes them unique.
    """
    text = unicodedata.normalize("NFKC", text)  # as Python reads it
    cleaned = "".join(letter if f"a{letter}".isidentifier() else "_" for letter in text)
    if cleaned != text or not text.isidentifier():
        cleaned = cleaned.strip("_") or "value"
    if not cleaned.isidentifier():
        cleaned = f"layer_{cleaned}"
    if len(cleaned) > LONGEST:
        half = (LONGEST - 2) // 2
        cleaned = f"{cleaned[:half]}__{cleaned[-half:]}"
    return cleaned


class Identifiers:
    """Gives out identifiers, each once.

    Args:
        reserved: names that are taken from the start.
    """

    def __init__(self, reserved: Iterable[str] = RESERVED) -> None:
        self._reserved = frozenset(reserved)
        self._taken = set(self._reserved)

    def take(self, wanted: str) -> str:
        """An identifier like `wanted` that was not given out before."""
        base = identifier(wanted)
        candidate = base
        if candidate in self._reserved:
            candidate = base = f"{base}_"
        number = 2
        while candidate in self._taken:
            candidate = f"{base}_{number}" if not base.endswith("_") else f"{base}{number}"
            number += 1
        self._taken.add(candidate)
        return candidate

    def take_numbered(self, wanted: str, between: str = "") -> str:
        """The same for classes: `Layer`, `Layer2`, `Layer3`."""
        numbered = (f"{wanted}{between}{number}" for number in itertools.count(2))
        return self.take(
            next(own for own in itertools.chain((wanted,), numbered) if own not in self)
        )

    def give_back(self, names: Iterable[str]) -> None:
        """Nothing is called by these names any more."""
        self._taken.difference_update(names)

    def __contains__(self, text: object) -> bool:
        return text in self._taken

    @property
    def taken(self) -> frozenset[str]:
        return frozenset(self._taken)


def class_name(text: str) -> str:
    """`resnet50` as the name of a class: `Resnet50`."""
    words = re.split(r"[\W_]+", text)
    return identifier("".join(word[:1].upper() + word[1:] for word in words if word) or "Model")
