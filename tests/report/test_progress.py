"""What progress prints where nobody watches, against lines worked out by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gpipe_compiler.report import terminal


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_step_that_goes_on_says_so_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = Clock(), io.StringIO()
    monkeypatch.setattr(terminal, "time", clock)
    with terminal.Spinner(Console(file=written)) as told:
        for seconds, step in ((0, "look: 0"), (10, "look: 1"), (16, "look: 2"), (20, "look: 3")):
            clock.now = float(seconds)
            told(step)
        clock.now = 32.0
        told("look: 4")
        clock.now = 33.0
    assert written.getvalue().splitlines() == ["look: 2", "look: 4", "look: 4 (33 s)"]
