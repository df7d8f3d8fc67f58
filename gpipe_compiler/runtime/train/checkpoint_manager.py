"""Writes the checkpoints of training, and finds the one to resume from."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.lr_scheduler import LRScheduler

from .. import checkpoint
from ..checkpoint.progress import Progress, Stateful
from ..core.address import Address, Place, place_of
from ..core.pipeline import Pipeline
from ..core.ranks import together
from ..core.storing import HeldError, locked
from ..core.typed import from_environment
from ..errors import CheckpointError, UsageError
from .process import say

LATEST = "latest"
KEPT = 3

_LOCK = ".lock"

_ENDING_S = 20.0
"""Seconds to wait for the lock of a process that torchrun has just killed to restart the job."""

_REFUSED = ".refused"
"""Beside the checkpoints: the job whose start was refused because of them."""

_CLAIM = "run"
"""The file beside the checkpoints that says whose they are."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What the user types about checkpoints.

    Attributes:
        directory: where they are written, None for none.
        every: number of steps; None for the end of every pass over the data.
        keep: how many of the newest.
        background: whether they are written while training goes on.
        resume: "latest" or the path or address of one; None to start from the beginning.
    """

    directory: Place | None = None
    every: int | None = None
    keep: int = KEPT
    resume: str | None = None
    background: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job by torchrun.

    Attributes:
        again: whether torchrun has restarted it after a failure.
    """

    again: bool = False
    job: str = ""

    @classmethod
    def here(cls) -> Attempt:
        again = from_environment("TORCHELASTIC_RESTART_COUNT") > 0
        return cls(again, os.environ.get("TORCHELASTIC_RUN_ID", ""))


def to_resume(options: CheckpointOptions, attempt: Attempt) -> Place | None:
    """The checkpoint to resume from; None to start from the beginning.

    A job that torchrun has started again goes on from the newest, unless its first start was
    refused: torchrun starts it again after that, too.

    Raises:
        UsageError: when the directory holds checkpoints of a run that nobody wants to resume.
        CheckpointError: when none is there that can be read.
    """
    directory, resume = options.directory, options.resume
    newest = None
    if directory is not None and (attempt.again or resume in (None, LATEST)):
        newest = checkpoint.latest(directory)
    if newest is not None and attempt.again and not _was_refused(newest.parent, attempt.job):
        return newest
    if resume is None and newest is not None:
        with contextlib.suppress(OSError):
            (newest.parent / _REFUSED).write_text(attempt.job, encoding="utf-8")
        raise UsageError(
            f"{directory} holds checkpoints already, the newest is {newest.name}",
            hint="go on from there with --resume, or name another --checkpoint-dir",
        )
    if directory is not None:
        with contextlib.suppress(OSError):
            (directory / _REFUSED).unlink()
    if resume is None or resume == LATEST:
        return newest
    path = place_of(resume)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    return checkpoint.latest(path) or path


def _was_refused(directory: Place, job: str) -> bool:
    try:
        return (directory / _REFUSED).read_text(encoding="utf-8") == job
    except OSError:
        return False


@dataclass(eq=False)
class CheckpointManager:
    """Writes the checkpoints of a run, and reads the one that it resumes from.

    Attributes:
        states: the user's own objects by name.
        last: the newest checkpoint of this run, for messages; None before the first.
    """

    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    states: Mapping[str, Stateful]
    options: CheckpointOptions
    last: Place | None = field(default=None, init=False)
    _background: checkpoint.BackgroundSaver | None = field(default=None, init=False)
    _saved: tuple[int, int] | None = field(default=None, init=False)
    _permitted: Callable[[], None] | None = field(default=None, init=False)
    _lock: contextlib.ExitStack[bool | None] = field(
        default_factory=contextlib.ExitStack, init=False
    )

    def resume(self) -> Progress | None:
        path, newest = self._agreed()
        if path is None:
            if self.options.resume == LATEST and self.pipe.rank == 0:
                print(
                    f"no checkpoint in {self.options.directory} yet: starting from the beginning",
                    file=sys.stderr,
                )
            return None
        try:
            progress = checkpoint.load_checkpoint(
                self.pipe,
                self.optimizer,
                path,
                scheduler=self.scheduler,
                scaler=self.pipe.scaler,
                states=self.states,
            )
        except BaseException:
            self.close()  # a claim outlives the process
            raise
        self.last = path
        if self.pipe.rank == 0:
            say(f"resumed from {path}, step {progress.step}")
        if newest:
            self._saved = progress.step, progress.epoch
        else:
            # Of several branches in one directory, a restart must find this one.
            self.save(progress, last=True)
        return progress

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Write a checkpoint, where they are wanted and this one is not there yet.

        Args:
            last: of this process, so that it must be there afterwards.
        """
        if last:
            self.wait()
        place = progress.step, progress.epoch
        if self.options.directory is None or self._saved == place:
            return
        save: Callable[..., Place | None] = functools.partial(checkpoint.save_checkpoint, self.pipe)
        if self.options.background and not last:
            self._background = self._background or checkpoint.BackgroundSaver(self.pipe)
            save = self._background.save
        there = save(
            self.optimizer,
            self.options.directory,
            progress,
            scheduler=self.scheduler,
            scaler=self.pipe.scaler,
            states=self.states,
            keep=self.options.keep,
            permitted=self._permitted,
        )
        self.last = there or self.last
        self._saved = place

    def poll(self) -> None:
        """After a step: what is being written appears, if it is complete on every rank."""
        if self._background is not None:
            self.last = self._background.poll() or self.last

    def wait(self) -> None:
        """What is being written is there afterwards."""
        if self._background is not None:
            self.last = self._background.wait() or self.last

    def close(self) -> None:
        self._lock.close()

    def _hold(self, attempt: Attempt) -> None:
        """Lock the directory, or claim the address, on rank 0."""
        directory = self.options.directory
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if isinstance(directory, Address):
                resumed = self.options.resume is not None
                claim = Claim.take(directory, attempt.job, again=attempt.again, resumed=resumed)
                self._permitted = claim.check
                self._lock.callback(claim.release)
                return
            wait_s = _ENDING_S if attempt.again else 0.0
            self._lock.enter_context(locked(directory / _LOCK, wait_s=wait_s))
        except HeldError as error:
            ways = "name another --checkpoint-dir, or end that run first"
            if isinstance(directory, Address):
                ways += "; if it was killed, --resume takes its place"
            raise UsageError(
                f"another run writes its checkpoints to {directory}: {error}", hint=ways
            ) from error
        except OSError as error:
            raise UsageError(f"cannot write to {directory}: {error.strerror}") from error

    def _agreed(self) -> tuple[Place | None, bool]:
        """The checkpoint to resume from, and whether it is the newest; rank 0 decides."""

        def look(attempts: Sequence[Attempt]) -> tuple[Place | None, bool]:
            # torchrun counts a restart only on the host whose own processes have failed.
            attempt = Attempt(any(attempt.again for attempt in attempts), attempts[0].job)
            try:
                self._hold(attempt)
                path = to_resume(self.options, attempt)
            except BaseException:
                self.close()  # a claim outlives the process
                raise
            directory = self.options.directory
            found = None if directory is None else checkpoint.latest(directory)
            return path, path is not None and path == found

        return together(self.pipe.world, "the checkpoint to go on from", Attempt.here, look)


# --- an address, where storage has no locks: who has claimed it last writes ---------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """That of this run, kept until it ends or another one takes it.

    Attributes:
        text: by lines: the process, torchrun's name of the job, and what no other run has.
    """

    file: Address
    text: str

    @classmethod
    def take(cls, directory: Address, job: str, *, again: bool, resumed: bool) -> Claim:
        """Claim an address.

        Args:
            again: whether torchrun has restarted the job: it takes its own claim, and no other.
            resumed: whether the user wants to go on from what is there, whoever wrote it: a run
                that was killed leaves its claim.

        Raises:
            HeldError: when another run has begun there and has not ended.
            OSError: when the address cannot be reached.
        """
        file = directory / _CLAIM
        held = _holder_of(file)
        holder, _, rest = held.partition("\n")
        own = again and rest.partition("\n")[0] == job
        if held and not own and (again or not resumed):
            raise HeldError(holder)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        claim = cls(file, f"{process}\n{job}\n{uuid.uuid4()}\n")
        file.write_text(claim.text, encoding="utf-8")
        return claim

    def check(self) -> None:
        """Raises a CheckpointError when another run has claimed the address since."""
        held = _holder_of(self.file)
        if held != self.text:
            holder = held.partition("\n")[0] or "a run that has ended"
            raise CheckpointError(
                f"another run has gone on from {self.file.parent}: {holder}",
                hint="only the newest run writes there; name another --checkpoint-dir",
            )

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if _holder_of(self.file) == self.text:
                self.file.unlink()


def _holder_of(file: Address) -> str:
    """What the claim says, nothing where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
