"""Messages between processes of one host, through memory that they share.

gloo moves bytes by threads of its own. Where every core computes, such a thread waits for a core
before a message gets on, and whoever then sends waits for the thread: milliseconds, for what takes
microseconds. Here the sender writes into memory that the receiver sees too, and tells it so over a
Unix socket. No thread is needed, and no core but those of the two processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


_HEADER = struct.Struct("<qqq")
"""Tag, bytes, and the number of the segment that holds them.

In place of that stands `_INLINE` where the bytes follow, and `_BY_GLOO` less a number where gloo
brings them, under that number."""

_INLINE, _BY_GLOO = -1, -2

_GLOO_TAG = 1 << 24

INLINE_BYTES = 2048
"""Messages so short go over the socket itself."""

LARGEST_BYTES, MOST_BYTES, MOST_SEGMENTS = 16 * 2**20, 128 * 2**20, 256
"""Of a segment, and of all from one process to another. gloo takes what finds no room in them."""

_Content = Segment | bytes | int
"""A message: where it lies, itself, or the tag under which gloo brings it."""


class Sent:
    """A message that has been written: nothing is left to wait for."""

    def is_completed(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: timedelta) -> None:
        """Not at all."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A message to be waited for, and the memory that it is for."""

    peers: Peers
    rank: int
    tag: int
    buffer: torch.Tensor

    def is_completed(self) -> bool:
        """Whether it has come."""
        return self.peers.here(self.rank, self.tag)

    def wait(self, timeout: timedelta) -> None:
        """Let it come.

        Raises:
            RuntimeError: when it does not.
        """
        self.peers.fetch(self.rank, self.tag, self.buffer, timeout.total_seconds())


class _Peer:
    """Another process: what goes to it, and what has come from it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.gone = False
        self._out: list[Segment] = []
        self._free: set[int] = set()
        self._read = FreeNumbers(MOST_SEGMENTS)
        self._by_gloo = 0
        self._in: list[Segment] = []
        self._back = -1
        self._arrived: dict[int, deque[tuple[int, _Content]]] = defaultdict(deque)

    def packet(self, payload: torch.Tensor, tag: int) -> tuple[bytes, list[int], int | None]:
        """What tells the other end of a message.

        With the descriptors of what the other end does not know yet, and with the tag that gloo is
        to send the message under, where there is one.
        """
        size = payload.numel()
        if size <= INLINE_BYTES:
            content = ctypes.string_at(payload.data_ptr(), size)
            return _HEADER.pack(tag, size, _INLINE) + content, [], None
        number, descriptors = self._segment(size)
        if number is None:
            self._by_gloo += 1
            header = _HEADER.pack(tag, size, _BY_GLOO - self._by_gloo)
            return header, [], _GLOO_TAG + self._by_gloo
        self._free.discard(number)
        self._out[number].bytes[:size].copy_(payload)
        return _HEADER.pack(tag, size, number), descriptors, None

    def _segment(self, size: int) -> tuple[int | None, list[int]]:
        """The number of a segment for so many bytes, with descriptors where it is new."""
        if not (fitting := self._fitting(size)):
            self._free.update(self._read.drained())
            fitting = self._fitting(size)
        if fitting:
            return min(fitting, key=lambda number: self._out[number].size), []
        # Of few sizes, so that messages of any size find room in what others have left.
        room = 1 << (size - 1).bit_length()
        held = sum(segment.size for segment in self._out)
        if room > LARGEST_BYTES or held + room > MOST_BYTES or len(self._out) == MOST_SEGMENTS:
            return None, []
        number, descriptors = len(self._out), []
        try:
            descriptors.append(os.memfd_create("pipeline", os.MFD_CLOEXEC))
            os.ftruncate(descriptors[0], room)
            if not self._out:
                descriptors.append(self._read.opened())
            self._out.append(Segment(number, descriptors[0], room))
        except OSError:  # too many open files, no memory left, or not allowed in this container
            for descriptor in descriptors:
                os.close(descriptor)
            return None, []
        return number, descriptors

    def _fitting(self, size: int) -> list[int]:
        return [number for number in self._free if self._out[number].size >= size]

    def tell(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        """Send a packet, unless too many lie unread."""
        try:
            socket.send_fds(self.connection, [packet], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"connection closed by the other end: {error}") from error
        return True

    def drain(self) -> None:
        """Take in what the other end has told."""
        while self.hear():
            pass

    def hear(self) -> bool:
        """Take in the next packet of the other end; whether there was one."""
        if self.gone:
            return False
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                self.connection, _HEADER.size + INLINE_BYTES, 2
            )
        except BlockingIOError:
            return False
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self.gone = True
            return False
        tag, size, number = _HEADER.unpack_from(packet)
        if descriptors:
            memory, *back = descriptors
            self._in.append(Segment(len(self._in), memory, os.fstat(memory).st_size))
            os.close(memory)
            self._back = back[0] if back else self._back
        content: _Content
        if number == _INLINE:
            content = packet[_HEADER.size :]
        else:
            content = self._in[number] if number >= 0 else _GLOO_TAG + _BY_GLOO - number
        self._arrived[tag].append((size, content))
        return True

    def has(self, tag: int) -> bool:
        """Whether a message of this tag is here."""
        while not self._arrived.get(tag):
            if not self.hear():
                return False
        return True

    def empty(self, segment: Segment, buffer: torch.Tensor) -> None:
        """Read the message that lies in a segment, and give that back."""
        buffer.copy_(segment.bytes[: buffer.numel()])
        try:  # contextlib.suppress takes as long as the rest
            os.write(self._back, segment.told)
        except OSError:
            return  # the other end is gone

    def close(self) -> None:
        """Leave the other end."""
        self.gone = True
        self.connection.close()
        self._read.close()
        if self._back >= 0:
            os.close(self._back)
            self._back = -1

    def take(self, tag: int) -> tuple[int, _Content]:
        """The first message of this tag, which is here."""
        waiting = self._arrived[tag]
        found = waiting.popleft()
        if not waiting:
            del self._arrived[tag]
        return found


class Peers:
    """The other processes of this host, each at the end of a connection.

    Messages of a tag arrive in the order in which they were sent. Sending does not wait for the
    receiver, as long as it looks at its messages now and then: a few hundred may lie unread.

    Args:
        connections: by rank, of the kind `SOCK_SEQPACKET`.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._peers = {rank: _Peer(connection) for rank, connection in connections.items()}
        self._ranks = {one.fileno(): rank for rank, one in connections.items()}

    def __contains__(self, rank: int) -> bool:
        return rank in self._peers

    def send(self, payload: torch.Tensor, rank: int, tag: int, timeout_s: float) -> Any:
        """Write a row of bytes for another process; what is returned has `Sent`'s methods.

        Raises:
            RuntimeError: when it is gone, or reads nothing for so long.
        """
        peer = self._peers[rank]
        packet, descriptors, by_gloo = peer.packet(payload, tag)
        end = time.monotonic() + timeout_s
        try:
            while not peer.tell(packet, descriptors):
                self._look(end, writing=rank)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Sent() if by_gloo is None else dist.isend(payload, rank, tag=by_gloo)

    def receive(self, buffer: torch.Tensor, rank: int, tag: int) -> Coming:
        """Expect a message, as long as the buffer is."""
        return Coming(self, rank, tag, buffer)

    def here(self, rank: int, tag: int) -> bool:
        """Whether a message has come, or never will: nobody need wait for it."""
        peer = self._peers[rank]
        return peer.has(tag) or peer.gone

    def fetch(self, rank: int, tag: int, buffer: torch.Tensor, timeout_s: float) -> None:
        """Wait for a message.

        Raises:
            RuntimeError: when the other process is gone, or does not send it in this time, or has
                sent one of another length.
        """
        peer = self._peers[rank]
        end = time.monotonic() + timeout_s
        while not peer.has(tag):
            if peer.gone:
                raise RuntimeError("connection closed by the other end")
            self._look(end)
        size, content = peer.take(tag)
        if size != buffer.numel():
            raise RuntimeError(f"{size} bytes came in place of {buffer.numel()}")
        if isinstance(content, Segment):
            peer.empty(content, buffer)
        elif isinstance(content, int):
            left = timedelta(seconds=max(end - time.monotonic(), 1e-3))
            work = dist.irecv(buffer, rank, tag=content)
            if work is not None:
                work.wait(left)
        elif content:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _look(self, end: float, writing: int | None = None) -> None:
        """Wait until something comes, from whomever, or can be written to one process.

        Whoever waits takes in all that comes: so nobody is kept from writing to it.
        """
        poll = select.poll()
        for rank, peer in self._peers.items():
            wanted = select.POLLOUT if rank == writing else 0
            if not peer.gone:
                poll.register(peer.connection, select.POLLIN | wanted)
        left = end - time.monotonic()
        ready = poll.poll(max(left, 0.0) * 1e3)
        if not ready and left <= 0:
            raise RuntimeError("timed out waiting for the other end")
        for descriptor, _ in ready:
            self._peers[self._ranks[descriptor]].drain()

    def close(self) -> None:
        """Leave the others; what was written can still be read."""
        for peer in self._peers.values():
            peer.close()


def join_peers(rank: int, size: int) -> Peers:
    """Connect the ranks of the process group that are on one host; all of them call it.

    Those that do not find each other, as in containers of their own, are left out.

    Raises:
        RuntimeError: when a rank is gone.
    """
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        address = str(Path(folder, "rank"))
        listener = _listener(address, size)
        places = _told((this_host(), address if listener else ""), size)
        found: dict[int, socket.socket] = {}
        for other, (host, path) in enumerate(places[:rank] if listener else ()):
            connection = _connected(path, rank) if path and host == places[rank][0] else None
            if connection is not None:
                found[other] = connection
        callers = [other for other, called in enumerate(_told(list(found), size)) if rank in called]
        if listener:
            for _ in callers:
                connection, _ = listener.accept()
                found[int(connection.recv(16))] = connection
            listener.close()
        return Peers(found)


def _told(own: object, size: int) -> list[Any]:
    """What every rank tells, in their order."""
    every: list[Any] = [None] * size
    dist.all_gather_object(every, own)
    return every


def _listener(address: str, most: int) -> socket.socket | None:
    """A socket to which others connect; None where this system has none of the kind."""
    if not hasattr(os, "memfd_create"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError:  # the path may be too long for a socket
        listener.close()
        return None
    listener.listen(most)
    return listener


def _connected(address: str, rank: int) -> socket.socket | None:
    """A connection to the process that listens there, if it can be reached."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        connection.send(str(rank).encode())
    except OSError:
        connection.close()
        return None
    return connection


def this_host() -> str:
    """What ranks of one host have in common."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
