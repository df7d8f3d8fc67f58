"""Numbers, lists and names in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SOME = 5


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: `1 op`, `2,048 ops`, `2 micro-batches` (plural "es")."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`; "" for no words."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def some(names: Iterable[str], joined: str = ", ") -> str:
    """The first few names, and how many more there are: `a, b, c, d, e and 7 more`."""
    every = list(names)
    more = f" and {len(every) - _SOME} more" if len(every) > _SOME else ""
    return joined.join(every[:_SOME]) + more


def text_of(error: BaseException) -> str:
    """What an error says; "" where the `__str__` of its class raises, as a user's own may."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # whatever that raises
        return ""


def ending(error: BaseException) -> str:
    """The end of a sentence that tells of an error: a colon and its text, "" without one."""
    text = text_of(error)
    return f": {text}" if text else ""


def said(error: BaseException) -> str:
    """The type of an error, and what it says."""
    return f"{type(error).__name__}{ending(error)}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)


def printable(text: str) -> str:
    """Text on one line, as it is but for what does not print: Python's escapes stand for that.

    So a name can neither end a line or a comment, nor command a terminal, nor turn the direction
    of writing around.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same of every line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def printable_message(text: str) -> str:
    """The same of a message, whose further lines are indented: none of them, which a name may hold,
    looks like a line of its own."""
    first, *others = map(printable, text.split("\n"))
    return "\n".join([first, *(ln if ln.startswith("  ") else f"    {ln}" for ln in others)])
