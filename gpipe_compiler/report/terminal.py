"""Where tables go."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 120


def terminal() -> Console:
    """Where tables go; a file or a pipe is wider than a small terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    return console
