"""What a command asks of its process: to print anywhere, to keep its memory, to stop in time.

It prints to a terminal, a file that is not UTF-8, a closed pipe. Ctrl-C and SIGTERM let the step
under way end, so that a checkpoint can be written.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from ..errors import PipelineError
from ..wording import printable_lines

BROKEN_PIPE = 141
"""The exit code of a program that a closed pipe ends, as shells have it."""

_PLAIN = {"→": "->", "…": "...", "µ": "u", "≥": ">="}


def say(text: str) -> None:
    """Print text, with escapes for characters that do not print."""
    print(printable_lines(text), flush=True)


def exit_code_of(command: Callable[[], int], closed: int = BROKEN_PIPE) -> int:
    """The exit code of a command that prints to whatever there is.

    What the encoding of stdout lacks is told in other letters; of a pipe that nobody reads any
    more nothing is said. Whoever closes the streams, as a user's file may, only flushes them.

    Args:
        closed: the exit code where stdout is such a pipe.
    """
    codecs.register_error("gpipe.plain", _plain)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed when the process began
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="gpipe.plain")
        if stream is getattr(sys, f"__{name}__"):
            stream.close = stream.flush
    try:
        code = command()
        print(end="", flush=True)  # unlike a method, with a stdout that was closed too
    except BrokenPipeError:
        # The interpreter flushes once more, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return closed
    except OSError as error:  # of the last flush; a command tells its own
        print(f"error: stdout: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        return code or 1
    return code


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written instead of characters that an encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    text = "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return text, error.end


_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_BLOCK = 128 * 1024
"""Bytes of blocks that are mapped by themselves: what glibc begins with (M_MMAP_THRESHOLD)."""


def keep_memory(block: int = _LARGEST // 2) -> None:
    """Let glibc's malloc keep freed memory for the next micro-batch, as long as the process lives.

    By default it gives every large block back to the system when it is freed, and takes the page
    faults of a new one for the next op: a sixth of the time of ResNet-50 in the plain accumulation
    of small micro-batches. What is kept does not serve all requests: the process takes up to 1.6
    times its tensors.

    Args:
        block: bytes of the largest that are kept. Where many things run, each with kernels that
            take memory of other sizes, what is kept of larger ones serves none: it adds up.
    """
    _malloc(block, _LARGEST)


def give_back_memory() -> None:
    """Let glibc's malloc give every large block back as soon as it is freed, where the
    memory of a device would not hold what it keeps."""
    _malloc(_BLOCK, _BLOCK)


def _malloc(mmap_threshold: int, trim_threshold: int) -> None:
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, mmap_threshold)
        mallopt(_TRIM_THRESHOLD, trim_threshold)


def resident(line_of: str = "VmHWM:") -> int:
    """Bytes of this process in memory, at most or now (`VmRSS:`); 0 where it is not known.

    Not those of `getrusage`, which begin with what the parent had when it forked.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(line_of):
                return 1024 * int(line.split()[1])
    return 0


def return_memory() -> None:
    """Let glibc's malloc give all that it keeps back to the system, for another process."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
ALONE_S = 10.0
"""Seconds after which a rank that was told to stop knows that rank 0 was not."""

_EXIT = 128
_STDOUT, _STDERR = 1, 2


class StopSignals:
    """Records the first signal; the second one has its default effect.

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

    def __exit__(self, *_: object) -> None:
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
        """Called when rank 0 continues.

        Raises:
            PipelineError: when this rank was told to stop a while ago: it alone was.
        """
        if self.received and time.monotonic() - self._since > ALONE_S:
            name = signal.Signals(self.received).name
            raise PipelineError(f"this rank alone was told to stop ({name})")


def exit_code(number: int) -> int:
    """The exit code of a process that a signal has stopped, as shells have it."""
    return _EXIT + number
