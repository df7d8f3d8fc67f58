"""The output of training: lines on the terminal, and a file with a line of JSON for every step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from ..core.storing import place
from ..errors import PipelineError
from .evaluation import EvaluationResult
from .optimizer import StepResult
from .process import say

LINES = 10
"""Lines of a run where the last one cannot be overwritten."""
LINE_EVERY = 10
"""Steps between lines where the number of steps is not known."""


class StepPrinter:
    """Prints the progress of training: one line that is overwritten on a terminal, else some lines.

    Args:
        steps: in all; None where it is not known.
    """

    def __init__(self, first: int, steps: int | None, *, quiet: bool) -> None:
        self.first = first
        self.steps = steps
        self.quiet = quiet
        self.terminal = sys.stdout.isatty()
        self.every = 1 if self.terminal else LINE_EVERY
        if steps is not None and not self.terminal:
            self.every = max(1, steps // LINES)
        self.start = time.perf_counter()
        self.samples = 0
        self.open = False

    def step(self, step: int, stepped: StepResult) -> None:
        if self.quiet:
            return
        now = time.perf_counter()
        self.samples += stepped.samples
        if not (step in (self.first, self.steps) or step % self.every == 0 or stepped.skipped):
            return
        rate = self.samples / (now - self.start)
        of = "" if self.steps is None else f"/{self.steps}"
        skipped = "  skipped: fp16 gradients overflow" if stepped.skipped else ""
        line = f"step {step}{of}  loss {stepped.loss:.6g}  {rate:.1f} samples/s{skipped}"
        print(f"\r{line}\033[K" if self.terminal else line, end="" if self.terminal else "\n")
        sys.stdout.flush()
        self.open = self.terminal
        if step == self.first:
            # The first step warms up, so it is left out of the rate.
            self.start, self.samples = time.perf_counter(), 0

    def line(self, text: str) -> None:
        """A line of its own."""
        if self.quiet:
            return
        self.close()
        say(text)

    def close(self) -> None:
        """End the line that could be overwritten."""
        if self.open:
            print(flush=True)
            self.open = False


class StepLog:
    """A file with one JSON object a line, for every step and for every evaluation:

        {"step": 3, "loss": 0.7, "lr": 0.1, "seconds": 0.02, "samples": 64, "skipped": false}
        {"evaluation": {"step": 3, "loss": 0.8}}

    `grad_norm` is there where gradients are clipped. Lines are written one by one; a process that
    is killed loses none but that of its last step.

    A number that is not finite is null.

    Args:
        step: the steps that are done: what the file says of later ones is cut off.

    Raises:
        PipelineError: here or later, when the file cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        with self._writing():
            kept = _cut(path, step)
            self._file = _opened(path)
        self._evaluated = max((_number(line) for line in kept if b"evaluation" in line), default=-1)

    def step(self, step: int, stepped: StepResult, seconds: float) -> None:
        line: dict[str, object] = {"step": step, "loss": stepped.loss, "lr": stepped.rate}
        if stepped.gradient_norm is not None:
            line["grad_norm"] = stepped.gradient_norm
        line |= {"seconds": seconds, "samples": stepped.samples, "skipped": stepped.skipped}
        self._write(line)

    def evaluation(self, step: int, found: EvaluationResult) -> None:
        """An evaluation is done; one that the file knows from before a restart is left out."""
        if step > self._evaluated:
            numbers = {"loss": found.loss, **found.metrics}
            self._write({"evaluation": {"step": step, **_plain(numbers)}})

    def close(self) -> None:
        with self._writing():
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        with self._writing():
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PipelineError(f"cannot write {self.path}: {error.strerror}") from error


def _cut(path: Path, step: int) -> list[bytes]:
    """Takes from a log what a run at this step will write again; the lines that stay.

    What is no file of its own, a terminal, a pipe or what stdout goes to, stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or _stream(path) is not None:
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if 0 <= _number(line) <= step] if step else []
    if kept != lines:
        place(path, lambda file: file.write_bytes(b"".join(kept)))
    return kept


def _opened(path: Path) -> TextIO:
    stream = _stream(path)
    if stream is not None:
        return os.fdopen(os.dup(stream), "a", encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _stream(path: Path) -> int | None:
    """The descriptor of stdout or stderr if it is this file, which opening would overwrite."""
    if path.exists():
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
    return None


def _number(line: bytes) -> int:
    """The step that a line is about; -1 for a line that was cut off when its process was killed."""
    try:
        content = json.loads(line)
        return int(content.get("evaluation", content)["step"]) if line.endswith(b"\n") else -1
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return -1


def _plain(numbers: Mapping[str, object]) -> dict[str, object]:
    """What JSON can say of these."""
    return {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in numbers.items()
    }
