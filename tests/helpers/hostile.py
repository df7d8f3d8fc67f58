"""Values and files that no option expects."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

VALUES = (
    "",
    " ",
    "-1",
    "0",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e37",
    "1e40",
    "1e300",
    "5e-324",
    "1e400",
    "1e999999999999999999999",
    "9" * 20,
    "-" + "9" * 20,
    "9" * 5000,
    "٣",
    "²",
    "\udcff",
    "a\nb",
    "é=1",
    "=",
    "x=9" + "9" * 5000,
    "/dev/null",
    "s3://bucket/x",
    "%s%(prog)s",
    "[/x]",
    "x" * 300,
    "x/" * 2000,
)

CODES = {0, 1, 2, 3}
"""Done, the model or its input at fault, wrong usage, a failed check."""


def options(parser: argparse.ArgumentParser) -> list[str]:
    """Every option of a parser that takes a value."""
    taking = (action for action in parser._actions if action.option_strings and action.nargs != 0)
    return [action.option_strings[-1] for action in taking]


def files(folder: Path) -> Iterator[Path]:
    """Files that hold nothing that anybody would read, and paths that are no files."""
    contents = {
        "empty": b"",
        "zeros": bytes(1000),
        "binary": bytes(range(256)) * 8,
        "truncated": b"\xff" * 7 + b"\x7f" + b"{}",
        "nested": b"[" * 100_000,
        "nested_table": b"x = " + b"[" * 100_000,
        "object": b"{}",
        "list": b"[]",
        "null": b"null",
        "number": b"9" * 10_000,
        "words": b'"stages"',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name
    (folder / "folder").mkdir()
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "private").write_text("{}")
    (folder / "private").chmod(0)
    yield from (folder / name for name in ("folder", "circle", "dangling", "private", "missing"))
    yield folder / "empty" / "below"
    yield folder / ("x" * 300)
    yield Path("/dev/null")
