"""What a plan was made by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpipe_compiler import __version__
from gpipe_compiler.text.escaping import shell_line


@dataclass(frozen=True, slots=True)
class Origin:
    """The versions that made a plan, and the command; "" where they are not known.

    Attributes:
        compiler: the version of gpipe-compiler.
        command: as a shell takes it; "" for a plan that was made from Python.
    """

    compiler: str = ""
    torch: str = ""
    command: str = ""

    @classmethod
    def here(cls, words: Sequence[str] = ()) -> Origin:
        """This program, as it was called with some arguments.

        Absolute paths among them, which mean nothing elsewhere, are told from the current directory
        on, or by their last name where they are not below it.
        """
        command = shell_line(["gpipe-compile", *map(_portable, words)]) if words else ""
        return cls(__version__, torch.__version__, command)


def _portable(word: str) -> str:
    """An argument, or `--option=argument`, without an absolute path."""
    option, equals, text = word.rpartition("=")
    path = Path(text)
    if not path.is_absolute():
        return word
    home = Path.cwd()
    return f"{option}{equals}{path.relative_to(home) if path.is_relative_to(home) else path.name}"
