"""Ctrl-C and SIGTERM let the step under way end, so that a checkpoint can be written."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from ..errors import PipelineError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ALONE_S = 10.0
"""Seconds after which a rank that was told to stop knows that rank 0 was not."""

_EXIT = 128
_STDERR = 2


class StopSignals:
    """Notes the first signal down; the second acts as it would have without this.

    Handlers are installed inside `with`, in the main thread only.

    Args:
        quiet: whether the user is not told.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.received = 0
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._since = time.monotonic()
        self._restore()
        if not self.quiet:
            # The main thread may be inside print: what it writes through cannot be entered again.
            name = signal.Signals(number).name
            os.write(_STDERR, f"\n{name}: stopping after this step; again: at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        self._before.clear()

    def check_alone(self) -> None:
        """Called when rank 0 goes on.

        Raises:
            PipelineError: when this rank was told to stop a while ago: it alone was.
        """
        if self.received and time.monotonic() - self._since > ALONE_S:
            name = signal.Signals(self.received).name
            raise PipelineError(f"this rank alone was told to stop ({name})")


def exit_code(number: int) -> int:
    """The exit code of a process that a signal has stopped, as shells have it."""
    return _EXIT + number
