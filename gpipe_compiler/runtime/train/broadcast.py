"""Broadcasts decisions that only rank 0 can make, such as the end of the data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from ..core.pipeline import Pipeline
from ..errors import AgreedError, TransportError


def broadcast_from_rank0(
    pipe: Pipeline, decide: Callable[[], Sequence[float]], what: str
) -> tuple[float, ...]:
    """The numbers that rank 0 decides on, on every rank.

    Args:
        decide: called on rank 0 only. What it raises is raised there, and ends the others.
        what: what is decided, for the message of a rank that waits in vain.

    Raises:
        AgreedError: on the other ranks, when `decide` has failed.
    """
    if pipe.rank != 0:
        failed, *numbers = pipe.share((), what)
        if failed:
            raise AgreedError("rank 0 has failed; its own message says why")
        return tuple(numbers)
    try:
        numbers = list(decide())
    except BaseException:
        with contextlib.suppress(TransportError):  # the first error is the one to raise
            pipe.share((1.0,), what)
        raise
    pipe.share((0.0, *numbers), what)
    return tuple(numbers)
