"""Markdown tables, for the other scripts here."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence

import torch


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose first column is aligned left and whose others are aligned right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return f"| {' | '.join([first, *rest])} |"

    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def machine() -> str:
    """What the numbers were measured on, in one line."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as info:  # noqa: PTH123 - no file that a path would name better
        names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return (
        f"{names[0] if names else model}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
