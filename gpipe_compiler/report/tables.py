"""Tables for a terminal, all of one look."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpipe_compiler.runtime.wording import printable_lines

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
    """Adds rows to a table; of very many the first and the last ones, and how many are between.

    Args:
        what: the rows are, in the plural.
    """
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
    """What and how much, line by line."""
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
