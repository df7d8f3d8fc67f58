"""Names and paths as text in Python, Markdown, file names and shell lines, and never as code.

What a model, a file or a path is called may hold anything. Every text that is made of it goes
through one of these, or through the escaping of Jinja (HTML, SVG) and of `json`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from gpipe_compiler.runtime.wording import printable, printable_lines

_LONGEST_FILE = 200
"""Bytes of a file's name, of the 255 that it may have, that are taken from a model's."""


def is_text(text: str) -> bool:
    """Whether a file can hold it in UTF-8: half of a surrogate pair is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def docstring(text: str) -> str:
    """Text inside of a docstring; its lines stay lines."""
    safe = printable_lines(text).replace("\\", r"\\")
    return re.sub(r'"(?="|$)', r"\"", safe)


def markdown(text: str) -> str:
    """Text in Markdown, in which nothing is markup."""
    return re.sub(r"[^\w\s.,:-]|(?<![^\W_])_|_(?![^\W_])", _entity, printable(text))


def code_span(text: str) -> str:
    """Text as code in Markdown, in a table or not."""
    safe = printable(text)
    if safe.strip() == safe != "" and not re.search(r"[`|<&\\]", safe):
        return f"`{safe}`"
    return f"<code>{re.sub(r'[^a-zA-Z0-9 ]', _entity, safe)}</code>"


def _entity(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"


def file_stem(text: str) -> str:
    """Text as the beginning of a file's name, in the folder where it is to be."""
    safe = re.sub(r"[/\\]", "_", printable(text))
    safe = safe.encode()[:_LONGEST_FILE].decode(errors="ignore")
    return f"_{safe[1:]}" if safe.startswith((".", "-")) else safe or "model"


def shell_line(words: Sequence[str | PurePath]) -> str:
    """A command that a shell takes word for word."""
    return " ".join(_shell_word(word) for word in words)


def _shell_word(word: str | PurePath) -> str:
    text = str(word)
    if isinstance(word, PurePath) and text.startswith("-"):
        text = f"./{text}"  # no option
    if text.isprintable():
        return shlex.quote(text)
    # As bash, zsh and ksh read it: the bytes of what does not print.
    quoted = "".join(c if c.isprintable() and c not in "\\'" else _bytes(c) for c in text)
    return f"$'{quoted}'"


def _bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))
