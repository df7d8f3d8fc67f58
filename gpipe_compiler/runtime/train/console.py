"""What a command prints, wherever it goes: a terminal, a file that is not UTF-8, a closed pipe."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable

from ..wording import printable_lines

BROKEN_PIPE = 141
"""The exit code of a program that a closed pipe ends, as shells have it."""

_PLAIN = {"→": "->", "…": "...", "µ": "u", "≥": ">="}


def say(text: str) -> None:
    """Print text; what does not print, in the name of a file or a value, is told by escapes."""
    print(printable_lines(text), flush=True)


def obeyed(command: Callable[[], int], closed: int = BROKEN_PIPE) -> int:
    """The exit code of a command that prints to whatever there is.

    What the encoding of stdout lacks is told in other letters; of a pipe that nobody reads any
    more nothing is said.

    Args:
        closed: the exit code where stdout is such a pipe.
    """
    codecs.register_error("gpipe.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="gpipe.plain")
    try:
        code = command()
        print(end="", flush=True)  # unlike a method, with a stdout that was closed too
    except BrokenPipeError:
        # The interpreter flushes once more, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return closed
    return code


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written instead of characters that an encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    text = "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return text, error.end
