"""Work that every rank of a run shares, and that fails on all of them or on none."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import CheckpointError, PipelineError
from .distributed import Network

T = TypeVar("T")
R = TypeVar("R")

FAILURES = (
    PipelineError,
    OSError,
    RuntimeError,  # torch's writer and reader, on anything from a full disk to a broken archive
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,  # torch.distributed.checkpoint checks what it reads with assert
    EOFError,
    MemoryError,
    pickle.PickleError,
)
"""What goes wrong with files, and with what they hold."""


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What an action gave on one rank: a value, or what went wrong."""

    value: T | None = None
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run; without a network this process alone."""

    network: Network | None

    @property
    def rank(self) -> int:
        """This process's number."""
        return 0 if self.network is None else self.network.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return 1 if self.network is None else self.network.size

    def together(
        self, what: str, action: Callable[[], T], conclude: Callable[[Sequence[T]], R]
    ) -> R:
        """Act on every rank, then conclude from the results on rank 0.

        Args:
            what: is done, for messages: "writing the checkpoint".
            conclude: from the results by rank, on rank 0 alone.

        Returns:
            The conclusion, on every rank.

        Raises:
            CheckpointError: on every rank, when any of them failed.
            TransportError: when another rank is gone.
        """
        mine, cause = _attempt(action)
        outcomes = [mine] if self.network is None else self.network.gather_objects(mine, what)
        answer: _Outcome[R] = _Outcome()
        if self.rank == 0:
            bad = [(rank, found) for rank, found in enumerate(outcomes) if found.problem]
            if bad:
                answer = self._joined(bad)
            else:
                results = [outcome.value for outcome in outcomes]
                answer, cause = _attempt(lambda: conclude(results))  # type: ignore[arg-type]  # no problem: a value
        if self.network is not None:
            answer = self.network.broadcast_object(answer, 0, what)
        if answer.problem:
            raise CheckpointError(answer.problem, hint=answer.hint) from cause
        return answer.value  # type: ignore[return-value]  # as above

    def _joined(self, bad: Sequence[tuple[int, _Outcome[T]]]) -> _Outcome[R]:
        several = self.size > 1
        texts = [
            f"rank {rank}: {found.problem}" if several else found.problem for rank, found in bad
        ]
        return _Outcome(problem="; ".join(texts), hint=bad[0][1].hint)


def described(error: BaseException) -> str:
    """An error in a few words, with the file it is about where it knows one."""
    if isinstance(error, PipelineError):
        return error.problem
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _attempt(action: Callable[[], T]) -> tuple[_Outcome[T], BaseException | None]:
    try:
        return _Outcome(action()), None
    except FAILURES as error:
        hint = error.hint if isinstance(error, PipelineError) else ""
        return _Outcome(problem=described(error), hint=hint), error
