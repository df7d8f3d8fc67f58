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
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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

_ROOM = 64
"""Bytes at the start of a segment; the first is 1 from when it is filled until it is read."""


class _Segment:
    """Memory of two processes, for one message at a time from the first to the second."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._memory = mmap.mmap(descriptor, _ROOM + size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.size = size

    @property
    def filled(self) -> bool:
        """Whether a message lies here that has not been read."""
        return self._memory[0] != 0

    def fill(self, payload: torch.Tensor) -> None:
        """Write a message."""
        self._bytes[_ROOM : _ROOM + payload.numel()].copy_(payload)
        self._memory[0] = 1

    def empty(self, buffer: torch.Tensor) -> None:
        """Read the message."""
        buffer.copy_(self._bytes[_ROOM : _ROOM + buffer.numel()])
        self._memory[0] = 0


_Content = _Segment | bytes | int
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
        self._out: list[_Segment] = []
        self._by_gloo = 0
        self._in: list[_Segment] = []
        self._arrived: dict[int, deque[tuple[int, _Content]]] = defaultdict(deque)

    def packet(self, payload: torch.Tensor, tag: int) -> tuple[bytes, int | None, int | None]:
        """What tells the other end of a message.

        With the descriptor of memory that the other end does not know yet, and with the tag that
        gloo is to send the message under, where there are such.
        """
        size = payload.numel()
        if size <= INLINE_BYTES:
            content = ctypes.string_at(payload.data_ptr(), size)
            return _HEADER.pack(tag, size, _INLINE) + content, None, None
        number, descriptor = self._segment(size)
        if number is None:
            self._by_gloo += 1
            header = _HEADER.pack(tag, size, _BY_GLOO - self._by_gloo)
            return header, None, _GLOO_TAG + self._by_gloo
        self._out[number].fill(payload)
        return _HEADER.pack(tag, size, number), descriptor, None

    def _segment(self, size: int) -> tuple[int | None, int | None]:
        """The number of a segment for so many bytes, with its descriptor where it is new."""
        fitting = [n for n, s in enumerate(self._out) if s.size >= size and not s.filled]
        if fitting:
            return min(fitting, key=lambda number: self._out[number].size), None
        # Of few sizes, so that messages of any size find room in what others have left.
        room = 1 << (size - 1).bit_length()
        held = sum(segment.size for segment in self._out)
        if room > LARGEST_BYTES or held + room > MOST_BYTES or len(self._out) == MOST_SEGMENTS:
            return None, None
        descriptor = -1
        try:
            descriptor = os.memfd_create("pipeline", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, _ROOM + room)
            self._out.append(_Segment(descriptor, room))
        except OSError:  # too many open files, no memory left, or not allowed in this container
            if descriptor >= 0:
                os.close(descriptor)
            return None, None
        return len(self._out) - 1, descriptor

    def tell(self, packet: bytes, descriptor: int | None) -> bool:
        """Send a packet, unless too many lie unread."""
        descriptors = [] if descriptor is None else [descriptor]
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
                self.connection, _HEADER.size + INLINE_BYTES, 1
            )
        except BlockingIOError:
            return False
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self.gone = True
            return False
        tag, size, number = _HEADER.unpack_from(packet)
        for descriptor in descriptors:
            room = os.fstat(descriptor).st_size
            self._in.append(_Segment(descriptor, room - _ROOM))
            os.close(descriptor)
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
        packet, descriptor, by_gloo = peer.packet(payload, tag)
        end = time.monotonic() + timeout_s
        try:
            while not peer.tell(packet, descriptor):
                self._look(end, writing=rank)
        finally:
            if descriptor is not None:
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
        if isinstance(content, _Segment):
            content.empty(buffer)
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
            peer.gone = True
            peer.connection.close()


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
