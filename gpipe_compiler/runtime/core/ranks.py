"""Work that every rank of a run shares, and that fails on all of them or on none."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import (
    AgreedError,
    CheckpointError,
    PipelineError,
    TransportError,
    UsageError,
)
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
    """What an action gave on one rank: a value, or what went wrong, by the user or otherwise."""

    value: T | None = None
    problem: str = ""
    hint: str = ""
    usage: bool = False


def together(
    network: Network, what: str, action: Callable[[], T], conclude: Callable[[Sequence[T]], R]
) -> R:
    """Act on every rank, then conclude from the results on rank 0.

    Args:
        what: is done, for messages: "writing the checkpoint".
        conclude: from the results by rank, on rank 0 alone.

    Returns:
        The conclusion, on every rank.

    Raises:
        CheckpointError, UsageError: on every rank, when any of them failed, by the first of them.
        TransportError: when another rank is gone.
    """
    mine, cause = _attempt(action)
    outcomes = network.gather_objects(mine, what)
    answer: _Outcome[R] = _Outcome()
    if network.rank == 0:
        bad = [(rank, found) for rank, found in enumerate(outcomes) if found.problem]
        if bad:
            several = network.size > 1
            texts = [
                f"rank {rank}: {found.problem}" if several else found.problem for rank, found in bad
            ]
            first = bad[0][1]
            answer = _Outcome(problem="; ".join(texts), hint=first.hint, usage=first.usage)
        else:
            results = [outcome.value for outcome in outcomes]
            answer, cause = _attempt(lambda: conclude(results))  # type: ignore[arg-type]  # no problem: a value
    answer = network.broadcast_object(answer, 0, what)
    if answer.problem:
        kind = UsageError if answer.usage else CheckpointError
        raise kind(answer.problem, hint=answer.hint) from cause
    return answer.value  # type: ignore[return-value]  # as above


def from_rank_0(network: Network, what: str, decide: Callable[[], T]) -> T:
    """What rank 0 alone can decide, such as the end of the data, on every rank.

    Args:
        what: is decided, for the message of a rank that waits in vain.
        decide: called on rank 0 only. What it raises is raised there, and ends the others.

    Raises:
        AgreedError: on the other ranks, when `decide` has failed.
    """
    if network.rank != 0:
        failed, value = network.broadcast_object((True, None), 0, what)
        if failed:
            raise AgreedError("rank 0 has failed; its own message says why")
        return value  # type: ignore[return-value]  # as rank 0 has sent it
    try:
        decided = decide()
    except BaseException:  # Ctrl-C too: nobody is to wait
        with contextlib.suppress(TransportError):  # the first error is the one to raise
            network.broadcast_object((True, None), 0, what)
        raise
    network.broadcast_object((False, decided), 0, what)
    return decided


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
        usage = isinstance(error, UsageError)
        return _Outcome(problem=described(error), hint=hint, usage=usage), error
