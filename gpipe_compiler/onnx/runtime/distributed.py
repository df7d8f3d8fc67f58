"""One device per process, under torchrun, on any number of hosts: what ranks hand to one another.

torch, which carries the messages, is needed for this alone. Values go through the memory of the
processor and gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np

from ...runtime.core.typed import from_environment
from ...runtime.errors import PipelineError, UsageError
from .travelling import Microbatch, packed, unpacked

TIMEOUT_S = 600.0

_HEAD_BYTES = 4096
"""Of the message that says what comes next, after its length; more is a message of its own."""

_LENGTH_BYTES = 8


def rank_here() -> int | None:
    """This process's number under torchrun; None where it was started by itself."""
    return from_environment("RANK") if "RANK" in os.environ else None


class World:
    """The processes of a run.

    Args:
        count: how many the pipeline needs.

    Raises:
        PipelineError: when another one is gone before all have found each other.
        UsageError: when torch is missing, or there are more or fewer.
    """

    def __init__(self, count: int) -> None:
        self.rank = from_environment("RANK")
        size = from_environment("WORLD_SIZE", 1)
        if size != count:
            raise UsageError(f"the pipeline needs {count} processes, torchrun started {size}")
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise UsageError(
                "torchrun starts this package where torch is installed; it is not here"
            ) from error
        with _told():
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self._dist = dist

    def send(self, array: np.ndarray, target: int, tag: int) -> None:
        """Sends an array, and waits until it is taken."""
        import torch

        with _told(target):
            self._dist.send(torch.from_numpy(array), target, tag=tag)

    def receive(self, array: np.ndarray, source: int, tag: int) -> None:
        """Fills an array with what comes."""
        import torch

        with _told(source):
            self._dist.recv(torch.from_numpy(array), source, tag=tag)

    def close(self) -> None:
        """Leaves; the others need not wait."""
        self._dist.destroy_process_group()


@contextmanager
def _told(rank: int | None = None) -> Iterator[None]:
    """Says of a message that fails with whom it was exchanged."""
    try:
        yield
    except RuntimeError as error:
        who = "another rank" if rank is None else f"rank {rank}"
        raise PipelineError(f"{who} cannot be reached any more: {error}") from error


class Link:
    """What one rank hands to another, in order; gloo holds back who is far ahead.

    A micro-batch is a message of a fixed size, what does not fit into it, and one for each array.

    Args:
        tag: of its messages, which no other link of these ranks has.
    """

    def __init__(self, world: World, source: int, target: int, tag: int) -> None:
        self._world, self._source, self._target, self._tag = world, source, target, tag

    def send(self, given: Microbatch | None) -> None:
        """Sends a micro-batch; None says that no more come.

        Raises:
            PipelineError: when the rank is gone.
        """
        data, arrays = (b"", []) if given is None else packed(given)
        head = np.zeros(_HEAD_BYTES, np.uint8)
        head[:_LENGTH_BYTES].view(np.int64)[0] = len(data)
        first = data[: _HEAD_BYTES - _LENGTH_BYTES]
        head[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = np.frombuffer(first, np.uint8)
        rest = np.frombuffer(bytearray(data[len(first) :]), np.uint8)
        for array in (head, rest, *arrays):
            if array.size:
                self._world.send(array, self._target, self._tag)

    def receive(self) -> Microbatch | None:
        """The next micro-batch; waits for it.

        Raises:
            PipelineError: when the rank is gone.
        """
        head = np.empty(_HEAD_BYTES, np.uint8)
        self._fill(head)
        length = int(head[:_LENGTH_BYTES].view(np.int64)[0])
        if not length:
            return None
        data = np.empty(length, np.uint8)
        first = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        data[: len(first)] = first
        self._fill(data[len(first) :])
        return unpacked(data.tobytes(), self._fill)

    def _fill(self, array: np.ndarray) -> None:
        if array.size:
            self._world.receive(array, self._source, self._tag)
