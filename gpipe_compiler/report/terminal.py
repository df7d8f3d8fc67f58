"""The terminal: its tables, and the progress of a command."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from gpipe_compiler.errors import Notice
from gpipe_compiler.runtime.wording import printable, printable_lines
from gpipe_compiler.text.units import format_seconds

PRINTED_S = 1.0

BETWEEN_LINES_S = 15.0
"""Seconds between lines of a step that goes on, where the console is no terminal."""

_PIPE_WIDTH = 120


class _Console(Console):
    """A console that leaves it to the command what a closed pipe means."""

    def on_broken_pipe(self) -> None:
        """Called while a BrokenPipeError is handled, which rich would end the program for."""
        raise  # noqa: PLE0704  # see above


def terminal() -> Console:
    """Where tables go; a file or a pipe is wider than a small terminal."""
    console = _Console()
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    return console


@contextlib.contextmanager
def notices(console: Console) -> Iterator[None]:
    """Prints every notice once, as a line of its own that does not name the compiler's files."""
    shown: set[str] = set()
    show_other = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if not isinstance(message, Notice):
            show_other(message, category, *rest, **named)
        elif (line := printable(f"note: {message}")) not in shown:
            shown.add(line)
            console.print(Text(line), soft_wrap=True)

    with mock.patch.object(warnings, "showwarning", show):
        yield


class Spinner:
    """A spinner with the current step; steps that took over a second stay as a line.

    A context manager that is called with the name of every step as it begins. Where nobody watches
    (the console is no terminal) there is no spinner, only the lines, and a word now and then.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = ""
        self._began = 0.0
        self._printed = 0.0
        self._status: Status | None = None

    def __enter__(self) -> Spinner:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def __call__(self, step: str) -> None:
        """Says that `step` begins, and with it that the one before is done.

        A step goes on, with other words, where both begin alike up to a colon.
        """
        step = printable(step)
        going_on = ":" in step and step.split(":")[0] == self._step.split(":")[0]
        if going_on:
            self._step = step
            if self._status is not None:
                self._status.update(Text(step))
            elif time.monotonic() - self._printed >= BETWEEN_LINES_S:
                self._printed = time.monotonic()
                self._console.print(step, markup=False)
            return
        self._finish()
        self._step, self._began = step, time.monotonic()
        self._printed = self._began
        if self._console.is_terminal:
            self._status = self._console.status(Text(step))
            self._status.start()

    def _finish(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if not self._step:
            return
        took = time.monotonic() - self._began
        if took >= PRINTED_S:
            self._console.print(f"{self._step} ({format_seconds(took)})", markup=False)
        self._step = ""


# --- tables, all of one look ----------------------------------------------------------------------

MOST_ROWS = 64
"""Rows of a table at most; of more, the first and the last ones are shown."""


def table_of(
    title: str, rows: Sequence[Mapping[str, str]], words: Container[str], what: str
) -> Table:
    """Rows of cells by column; of very many the first and the last, and how many are between.

    Args:
        words: columns of words, which stand at the left and fold; those of figures do neither.
        what: the rows are, in the plural.
    """
    table = figure_table(title, rows[0] if rows else (), words)
    add_rows(table, [tuple(row.values()) for row in rows], what)
    return table


def figure_table(title: str, columns: Iterable[str], words: Container[str]) -> Table:
    """An empty table; columns of words stand at the left and fold, those of figures do neither."""
    table = _titled(title)
    table.collapse_padding = True
    for name in columns:
        if name in words:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def cell(text: str) -> Text:
    """Text as it is: its brackets are no markup, and it commands no terminal."""
    return Text(printable_lines(text))


def add_rows(table: Table, rows: Sequence[Sequence[str]], what: str) -> None:
    """Adds rows to a table; of very many the first and the last ones, and how many are between."""
    if len(rows) <= MOST_ROWS:
        for row in rows:
            table.add_row(*map(cell, row))
        return
    ends = MOST_ROWS // 2
    for row in rows[:ends]:
        table.add_row(*map(cell, row))
    table.add_row("…", *("" for _ in rows[0][1:]))
    for row in rows[-ends:]:
        table.add_row(*map(cell, row))
    table.caption = f"{len(rows) - 2 * ends:,} {what} in between; --json lists them all"


def pairs_table(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = _titled(title)
    table.show_header = False
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(cell(name), cell(value))
    return table


def _titled(title: str) -> Table:
    return Table(
        title=escape(title),
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
