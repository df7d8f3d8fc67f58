"""Where tables go."""

from __future__ import annotations

from rich.console import Console

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
