"""Numbers in messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: `1 op`, `2,048 ops`, `2 micro-batches` (plural "es")."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
