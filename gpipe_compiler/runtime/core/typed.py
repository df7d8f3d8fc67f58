"""What is typed for an option, or set in the environment: numbers that fit where they go."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ..errors import UsageError
from ..wording import printable

MOST = 2**31 - 1
"""Of anything that is counted."""

MOST_MICROBATCHES = 100_000
"""The actions of a schedule are listed before it runs."""

LONGEST_WAIT_S = 2_000_000.0
"""Seconds; sockets count milliseconds in 32 bits."""

LARGEST = 1e37
"""Of a number that torch computes with: Adam takes ten times its rate, and fp32 holds 3.4e38."""

SEEDS = range(-(2**63), 2**63)

_DEEPEST = 256
"""Folders in one another."""

_SHOWN = 40
"""Characters of what was typed that a message repeats."""


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # of too many digits, too
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is no whole number from {least:,} to {most:,}"
            )
        return number

    return read


positive, natural = whole(1), whole(0)
microbatches = whole(1, MOST_MICROBATCHES)
seed = whole(SEEDS.start, SEEDS.stop - 1)


def from_environment(name: str, least: int = 0) -> int:
    """The whole number that the launcher of this process says in a variable of its environment.

    Args:
        least: that it may be, and what it is where there is no such variable.

    Raises:
        UsageError: when it is none.
    """
    text = os.environ.get(name)
    if text is None:
        return least
    try:
        return whole(least)(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(
            f"{name} in the environment: {error}",
            hint="unset it, or start the processes with torchrun, which sets it",
        ) from error


def positive_real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: a number above 0 is needed, of {LARGEST:g} at most"
        )
    return number


def size(text: str) -> int:
    """The type of an option that is a number of bytes: 500MB, 2GiB, 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", text)
    if match is None or not 0 < float(match[1]) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number of bytes, such as 500MB")
    power = "KMGT".find(match[2].upper()) + 1 if match[2] else 0
    return max(1, int(float(match[1]) * (1024 if match[3] else 1000) ** power))


def path(text: str) -> Path:
    """The type of an option that is a file or a folder of this machine."""
    if scheme(text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is a URL: name a path, where the storage is mounted"
        )
    found = Path(text)
    if not text or len(found.parts) > _DEEPEST:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no path")
    return found


class Version(argparse.Action):
    """`--version`, which says what wrote a package, as its plan.json tells."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, directory: Path) -> None:
        super().__init__(option_strings, dest, nargs=0, help="say what wrote this")
        self.directory = directory

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it, and end the program."""
        try:
            plan = json.loads((self.directory / "plan.json").read_text(encoding="utf-8"))
            origin = plan["origin"]
            text = f"gpipe-compiler {origin['compiler']}, with torch {origin['torch']}"
            text += f": {origin['command']}" if origin["command"] else ""
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            text = "the package has no plan.json that says what wrote it"
        print(printable(text))
        parser.exit()


def scheme(text: str) -> str:
    """What an address begins with, such as `s3`; nothing for a path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    return match[1] if match else ""


def path_or_word(text: str) -> str:
    """The type of an option that is such a path or a word of its own; as it was typed."""
    path(text)
    return text


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def numbers_of(known: Collection[str]) -> Callable[[str], dict[str, int]]:
    """The type of an option that gives some of these names a number: `tokens=2048,items=4`."""

    every = ", ".join(known) or "none here"

    def read(text: str) -> dict[str, int]:
        found = {}
        for part in names(text):
            name, _, number = part.partition("=")
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{shown(part)}: NAME=NUMBER is needed, and the names are {every}"
                )
            found[name] = positive(number)
        return found

    return read


def shown(text: str) -> str:
    """What was typed, as a message repeats it."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
