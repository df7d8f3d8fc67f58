"""Numbers and lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: `1 op`, `2,048 ops`, `2 micro-batches` (plural "es")."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`; "" for no words."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
