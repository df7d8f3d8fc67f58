"""Tables for a terminal, all of one look."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rich import box
from rich.table import Table


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


def pairs_table(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """What and how much, line by line."""
    table = _titled(title)
    table.show_header = False
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    return table


def _titled(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
