"""Memory that two processes of a host share, and how it is handed to and fro."""

from __future__ import annotations

import mmap
import os
import struct

import torch

_NUMBER = struct.Struct("<H")
"""The number of a segment that has been read, as its reader tells it."""


class Segment:
    """Memory of two processes, for one message at a time from the first to the second."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.told = _NUMBER.pack(number)
        self.size = size
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class FreeNumbers:
    """The numbers of segments that the other end has read, which come through a pipe.

    A byte in the memory itself would do on x86. A processor that orders memory weakly, such as ARM,
    may show it cleared before it has read the last of the message, which the next one then writes
    over. Who writes to a pipe and who reads from it takes the same lock of the kernel: what came
    before the one is seen by all that comes after the other. A pipe holds more numbers than there
    are segments, so that nobody waits.

    Args:
        most: segments that there can be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._reading = -1

    def opened(self) -> int:
        """The end that is written to, for the other process."""
        self.close()
        self._reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return writing

    def drained(self) -> list[int]:
        """Those that have come."""
        try:
            found = os.read(self._reading, _NUMBER.size * self._most)
        except OSError:  # there are none, or nothing has been sent yet
            return []
        return [number for (number,) in _NUMBER.iter_unpack(found)]

    def close(self) -> None:
        """Let go of the pipe."""
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1
