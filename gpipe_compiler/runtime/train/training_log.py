"""The output of training: lines on the terminal, a file with a line of JSON for every step, and the
numbers of every step for the user's `log` and for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from ..core.pipeline import Pipeline
from ..core.ranks import from_rank_0
from ..core.storing import place
from ..errors import PipelineError, UsageError
from .evaluation import EvaluationResult
from .hooks import UserHooks
from .optimizer import StepResult
from .process import say
from .told import Told, planned_samples

LINES = 10
"""Lines of a run where the last one cannot be overwritten."""
LINE_EVERY = 10
"""Steps between lines where the number of steps is not known."""

_FLUSH_S = 10
"""Seconds of which a process that is killed loses what it gave to TensorBoard."""


class Reports:
    """All that is told of training: on the terminal, in a log, by the user's `log` and TensorBoard.

    Every rank makes one and calls it alike: each tells of its own devices, rank 0 of the rest, and
    what the user's code raises there ends all.

    Args:
        done: the steps that are done; a log and TensorBoard drop what they have of later ones.
        steps: in all; None where it is not known.
        log: a file for a line of JSON for every step.
        tensorboard: a folder for TensorBoard's files.
        told: the prediction for a mini-batch, where this run is the one that was planned.
        accumulate: mini-batches for a step.
    """

    def __init__(
        self,
        pipe: Pipeline,
        hooks: UserHooks,
        done: int,
        steps: int | None,
        log: Path | None,
        tensorboard: Path | None,
        told: Told | None,
        accumulate: int,
    ) -> None:
        self.pipe, self.hooks, self.told, self.accumulate = pipe, hooks, told, accumulate
        self.printer = StepPrinter(done + 1, steps, quiet=pipe.rank != 0)
        self._log: StepLog | None = None
        self._board: _TensorBoard | None = None
        self._planned = planned_samples(pipe.spec) * pipe.replicas * accumulate
        self._watched = hooks.log is not None or tensorboard is not None

        def begin() -> None:
            if log is not None:
                self._log = StepLog(log, done)
            if tensorboard is not None:
                self._board = _TensorBoard(tensorboard, done)

        from_rank_0(pipe.world, "the log", begin)
        if not self._watched:
            return
        own = [engine.device for engine in pipe.execution.engines]
        self._gpus = [device for device in own if device.type == "cuda"]
        some = torch.tensor(float(bool(self._gpus)))
        self._memory_is_told = bool(pipe.world.maximum(some, "the kinds of devices"))
        names = [torch.cuda.get_device_name(x) if x.type == "cuda" else x.type for x in own]
        found = pipe.world.gather_objects(names, "the names of devices")
        self._names = frozenset(name for rank in found for name in rank)

    def step(self, step: int, stepped: StepResult, seconds: float) -> None:
        """A step is done.

        Raises:
            PipelineError: when the user's code raises, or a file cannot be written; AgreedError on
                the other ranks.
        """
        self.printer.step(step, stepped)
        if self._log is not None:
            self._log.step(step, stepped, seconds)
        if not self._watched:
            return
        peaks: list[list[int]] = []
        if self._memory_is_told:
            own = [torch.cuda.max_memory_allocated(device) for device in self._gpus]
            peaks = self.pipe.world.gather_objects(own, "the memory of devices")

        def tell() -> None:
            numbers = {"loss": stepped.loss, "learning_rate": stepped.rate}
            if stepped.gradient_norm is not None:
                numbers["gradient_norm"] = stepped.gradient_norm
            numbers["samples_per_s"] = stepped.samples / seconds
            if stepped.tokens is not None:
                numbers["tokens_per_s"] = stepped.tokens / seconds
            for device, peak in enumerate(peak for rank in peaks for peak in rank):
                numbers[f"peak_bytes/device_{device}"] = float(peak)
            if self.told is not None and stepped.samples == self._planned:
                numbers |= self.told.numbers(seconds, self._names, self.accumulate)
            if self._board is not None:
                self._board.add(step, numbers)
            self.hooks.logged(step, numbers)

        from_rank_0(self.pipe.world, "the log", tell)

    def evaluation(self, step: int, found: EvaluationResult) -> None:
        """An evaluation is done, of which the user's `log` is not told."""
        self.line(f"evaluation after step {step}: {found}")
        if self._log is not None:
            self._log.evaluation(step, found)
        if self._board is not None:
            self._board.add(step, {f"evaluation/{name}": x for name, x in found.numbers.items()})

    def line(self, text: str) -> None:
        """A line of its own on the terminal; nothing for no text."""
        if text:
            self.printer.line(text)

    def close(self) -> None:
        for each in (self.printer, self._log, self._board):
            if each is not None:
                each.close()


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
        with _writing(path):
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
            self._write({"evaluation": {"step": step, **_plain(found.numbers)}})

    def close(self) -> None:
        with _writing(self.path):
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        with _writing(self.path):
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:  # TensorBoard's: of names that are no UTF-8
        why = getattr(error, "strerror", None) or error
        raise PipelineError(f"cannot write {path}: {why}") from error


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


def check_tensorboard() -> None:
    """Refuses to begin without the package that writes its files.

    Raises:
        UsageError: when it cannot be imported.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard, and it cannot be imported: {error}",
            hint="pip install tensorboard",
        ) from error


class _TensorBoard:
    """The files of one run.

    Raises:
        PipelineError: here or later, when they cannot be written.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        with _writing(folder):
            module = importlib.import_module("torch.utils.tensorboard")
            self._writer: Any = module.SummaryWriter(
                str(folder), purge_step=steps + 1, flush_secs=_FLUSH_S
            )

    def add(self, step: int, numbers: dict[str, float]) -> None:
        with _writing(self.folder):
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        with _writing(self.folder):
            self._writer.close()
