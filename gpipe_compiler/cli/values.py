"""What single arguments stand for, and options that several commands have in the same way."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from gpipe_compiler.cluster.quantities import Quantity
from gpipe_compiler.options import Auto
from gpipe_compiler.runtime.core.typed import natural, positive, shown

AUTO: str = Auto.AUTO.value


def words_of(kinds: Iterable[Enum]) -> list[str]:
    return [kind.value for kind in kinds]


def choice(group: argparse._ActionsContainer, option: str, words: list[str], text: str) -> None:
    """An option that is one of some words, the first by default."""
    text = f"{text} (default %(default)s)"
    group.add_argument(option, choices=words, default=words[0], help=text)


def repeated(
    group: argparse._ActionsContainer,
    option: str,
    metavar: str,
    text: str,
    kind: Callable[[str], Any] = str,
) -> None:
    """An option that may be given several times."""
    group.add_argument(option, metavar=metavar, type=kind, action="append", default=[], help=text)


def count_or_auto(text: str) -> int | Auto:
    if text == AUTO:
        return Auto.AUTO
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, and it is not auto") from error


def counts(text: str) -> tuple[int, ...]:
    """Numbers, each once, in their order."""
    try:
        return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}: write numbers, such as 1,2,4,8") from error


def share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no share, such as 0.03")
    return found


def pin(text: str) -> tuple[str, int]:
    module, _, stage = text.rpartition("=")
    if not module or not re.fullmatch(r"-?\d{1,9}", stage, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} pins nothing: write MODULE=STAGE, such as encoder.0=1 or head=-1"
        )
    return module, int(stage)


def batch_dim(text: str) -> tuple[str, int | None]:
    name, _, dim = text.partition("=")
    if not name or not (dim == "none" or dim.isdecimal()):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not NAME=DIM, such as x=1 or mask=none")
    return name, None if dim == "none" else natural(dim)


def carried(text: str) -> tuple[str, str]:
    """An input that a session holds between calls, and the output that it becomes."""
    past, _, present = text.partition("=")
    if not past or not present:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not PAST=PRESENT, an input and an output"
        )
    return past, present


def named_size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not NAME=N, such as input_ids.1=2048")
    return name, positive(size)


def number_of(quantity: Quantity) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return quantity.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
