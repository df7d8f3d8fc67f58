"""Messages between processes of one host, through memory that they share.

gloo moves bytes by threads of its own. Where every core computes, such a thread waits for a core
before a message gets on, and whoever then sends waits for the thread: milliseconds, for what takes
microseconds. Here the sender writes into memory of the system and hands it over by a Unix socket;
who has read it hands it back. No thread is needed, and no core but those of the two processes. No
process maps that memory: system calls write and read it, and what is written before a packet is
sent is read after it is received, on processors that reorder accesses (ARM) too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from ..errors import TransportError

_HEADER = struct.Struct("<qq")
"""Tag and bytes of a message."""

INLINE_BYTES = 2048
"""Messages so short go over the socket; longer ones in pieces, where no memory can be shared."""

_BACK = -1
"""In place of the tag, with memory that has been read."""

MOST_FREE = 64
"""Pieces of memory to one process that are kept until they are used again."""

MOST_FREE_BYTES = 1 << 28
"""Bytes of these pieces: they come on top of what a plan counts."""


@dataclass(slots=True)
class Coming:
    """A message to be waited for.

    Attributes:
        buffer: the memory that it is for.
        content: where it lies once it has come: the buffer, if that is as long.
    """

    peers: Peers
    rank: int
    buffer: torch.Tensor
    content: torch.Tensor | None = None

    def wait(self, timeout: timedelta) -> None:
        """Let it come.

        Raises:
            RuntimeError: when the other process is gone, or does not send it in this time, or has
                sent one of another length.
        """
        self.peers.fetch(self, time.monotonic() + timeout.total_seconds())


class _Peer:
    """Another process: what has come from it, and who waits for what is to come, by tag."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.gone = False
        self._arrived: dict[int, deque[torch.Tensor]] = defaultdict(deque)
        self._expected: dict[int, deque[Coming]] = defaultdict(deque)
        self._pieces = bytearray()
        self._free: list[int] = []

    def memory(self, size: int) -> int | None:
        """The descriptor of memory to write to; None where the system gives none."""
        if not self._free:
            while self.hear():
                pass
        if not self._free:
            try:
                return os.memfd_create("pipeline", os.MFD_CLOEXEC)
            except OSError:  # too many open files, or not allowed in this container
                return None
        # What is as large as it must be, or else the largest, which then grows.
        sizes = [os.fstat(descriptor).st_size for descriptor in self._free]
        fitting = [(room, place) for place, room in enumerate(sizes) if room >= size]
        _, place = min(fitting) if fitting else max((r, p) for p, r in enumerate(sizes))
        return self._free.pop(place)

    def tell(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        """Send a packet, unless too many lie unread."""
        try:
            socket.send_fds(self.connection, [packet], descriptors)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            raise RuntimeError(f"connection closed by the other end: {error}") from error
        return True

    def expect(self, coming: Coming, tag: int) -> None:
        """Give it the first message of a tag that nobody else expects."""
        waiting = self._arrived.pop(tag, None)
        if waiting is None:
            self._expected[tag].append(coming)
            return
        coming.content = waiting.popleft()
        if waiting:
            self._arrived[tag] = waiting

    def hear(self) -> bool:
        """Take in the next packet of the other end; whether there was one."""
        if self.gone:
            return False
        try:
            packet, descriptors, flags, _ = socket.recv_fds(
                self.connection, _HEADER.size + INLINE_BYTES, 1
            )
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The other end has left without hearing all. What it had sent comes after this.
            return self.hear()
        except OSError:
            packet, descriptors, flags = b"", [], 0
        if not packet:
            self.gone = True
            return False
        if flags & socket.MSG_CTRUNC:
            raise TransportError(
                "this process has too many open files to take a message of another rank",
                hint="allow it more of them: `ulimit -n 4096` before it starts",
            )
        tag, size = _HEADER.unpack_from(packet)
        if tag == _BACK:
            self._keep(descriptors[0])
            return True
        if descriptors:
            _read(self._place(tag, size), descriptors[0])
            self._give_back(descriptors[0])
            return True
        self._pieces += packet[_HEADER.size :]
        if len(self._pieces) == size:
            memory_of(self._place(tag, size))[:] = self._pieces
            self._pieces = bytearray()
        return True

    def _place(self, tag: int, size: int) -> torch.Tensor:
        """The memory for a message that is here: where it is expected, if that is as long."""
        expected = self._expected.get(tag)
        if not expected:
            place = torch.empty(size, dtype=torch.uint8)
            self._arrived[tag].append(place)
            return place
        coming = expected.popleft()
        if not expected:
            del self._expected[tag]
        fits = coming.buffer.numel() == size
        coming.content = coming.buffer if fits else torch.empty(size, dtype=torch.uint8)
        return coming.content

    def _keep(self, descriptor: int) -> None:
        kept = sum(os.fstat(each).st_size for each in (*self._free, descriptor))
        if len(self._free) < MOST_FREE and kept <= MOST_FREE_BYTES:
            self._free.append(descriptor)
        else:
            os.close(descriptor)

    def _give_back(self, descriptor: int) -> None:
        # The other end may be gone, or have no room for it: then nobody uses it again.
        with contextlib.suppress(RuntimeError):
            self.tell(_HEADER.pack(_BACK, 0), [descriptor])
        os.close(descriptor)

    def close(self) -> None:
        self.gone = True
        self.connection.close()
        while self._free:
            os.close(self._free.pop())


def memory_of(row: torch.Tensor) -> memoryview:
    """A row of bytes, to be read and written in place."""
    return memoryview((ctypes.c_char * row.numel()).from_address(row.data_ptr())).cast("B")


def _read(row: torch.Tensor, descriptor: int) -> None:
    """Fill a row of bytes from memory that another process has written."""
    memory, done = memory_of(row), 0
    while done < len(memory):
        done += os.preadv(descriptor, [memory[done:]], done)


def _write(row: torch.Tensor, descriptor: int) -> bool:
    """Write a row of bytes to memory, if the system has as much."""
    memory, done = memory_of(row), 0
    try:
        while done < len(memory):
            done += os.pwrite(descriptor, memory[done:], done)
    except OSError:
        return False
    return True


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

    def send(self, payload: torch.Tensor, rank: int, tag: int, timeout_s: float) -> None:
        """Write a row of bytes for another process.

        Raises:
            RuntimeError: when it is gone, or reads nothing for so long.
        """
        end = time.monotonic() + timeout_s
        size = payload.numel()
        header = _HEADER.pack(tag, size)
        descriptor = self._peers[rank].memory(size) if size > INLINE_BYTES else None
        if descriptor is not None:
            try:
                if _write(payload, descriptor):
                    self._tell(rank, header, [descriptor], end)
                    return
            finally:
                os.close(descriptor)
        memory = memory_of(payload)
        for start in range(0, size, INLINE_BYTES):
            self._tell(rank, header + memory[start : start + INLINE_BYTES], [], end)

    def _tell(self, rank: int, packet: bytes, descriptors: Sequence[int], end: float) -> None:
        while not self._peers[rank].tell(packet, descriptors):
            self._look(end, writing=rank)

    def receive(self, buffer: torch.Tensor, rank: int, tag: int) -> Coming:
        """Expect the next message of a tag, as long as the buffer is."""
        coming = Coming(self, rank, buffer)
        self._peers[rank].expect(coming, tag)
        return coming

    def fetch(self, coming: Coming, end: float) -> None:
        """Wait for a message, at most until `end`; see `Coming.wait`."""
        peer = self._peers[coming.rank]
        while coming.content is None and not peer.gone:
            if not peer.hear() and not peer.gone:
                self._look(end)
        content, buffer = coming.content, coming.buffer
        if content is None:
            raise RuntimeError("connection closed by the other end")
        if content.numel() != buffer.numel():
            raise RuntimeError(f"{content.numel()} bytes came in place of {buffer.numel()}")
        if content is not buffer:
            buffer.copy_(content)

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
        if left <= 0 and not any(events & ~select.POLLOUT for _, events in ready):
            raise RuntimeError("timed out waiting for the other end")
        for descriptor, _ in ready:
            while self._peers[self._ranks[descriptor]].hear():
                pass

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
    """What every rank contributes, in rank order."""
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
