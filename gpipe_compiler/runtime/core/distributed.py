"""Messages between processes: torch.distributed point to point, or memory that they share."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import TransportError
from ..wording import first_line
from .same_host import Peers, join_peers
from .typed import from_environment

T = TypeVar("T")

_SUM_TAG = 1 << 20

_RESULT_TAG = 1 << 21

_PACKET = 1024
"""Bytes of the first message of an object, which most objects fit into."""


def launched() -> bool:
    """Whether torchrun (or the like) started this process as one of several."""
    return dist.is_available() and (dist.is_initialized() or from_environment("WORLD_SIZE", 1) > 1)


@contextlib.contextmanager
def others_there(problem: Callable[[], str]) -> Iterator[None]:
    """Around what other ranks take part in; errors of torch become a TransportError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"{problem()}: {first_line(error)}",
            hint="another rank has ended or is stuck; its own message says why",
        ) from error


@dataclass(frozen=True)
class Network:
    """Some of the ranks that torchrun started, in order; this process is one of them.

    Those of a pipeline, or those that hold the same device in every replica, or all.

    Attributes:
        members: their global ranks. Everything else here numbers them from 0, in this order;
            messages name global ranks.
        rank: this process's number among them.
        timeout_s: seconds until a value that does not come is given up.
        by_host: whether tensors travel through host memory.
        peers: the ranks that are reached in memory that they share with this one.
    """

    members: tuple[int, ...]
    rank: int
    device: torch.device
    timeout_s: float
    by_host: bool
    peers: Peers

    @classmethod
    def of_all(cls, device: torch.device, timeout_s: float) -> Network:
        """All ranks of the process group, which all call it.

        Raises:
            TransportError: when one of them is gone.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        by_host = "nccl" not in dist.get_backend()
        with others_there(lambda: f"rank {rank} does not find the others"):
            peers = join_peers(rank, size) if by_host else Peers({})
        return cls(tuple(range(size)), rank, device, timeout_s, by_host, peers)

    @classmethod
    def alone(cls, device: torch.device) -> Network:
        """This process without any other, which nothing is sent to or waited for."""
        return cls((0,), 0, device, math.inf, by_host=False, peers=Peers({}))

    def among(self, members: Sequence[int]) -> Network:
        """The network of some ranks, by global rank, with this one among them."""
        return dataclasses.replace(self, members=tuple(members), rank=members.index(self.own))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def own(self) -> int:
        return self.members[self.rank]

    @property
    def carrier(self) -> torch.device:
        """Where tensors must lie to travel: gloo reads host memory only."""
        return torch.device("cpu") if self.by_host else self.device

    def wait(self, work: Any, what: Callable[[], str]) -> None:
        """Wait for one operation.

        Raises:
            TransportError: naming the rank and what it waited for.
        """
        with others_there(lambda: f"rank {self.own} gave up {what()}"):
            if self.by_host:
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                work.wait()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Any, torch.Tensor] | None:
        """Start sending; keep what is returned until it has been waited for. None: it is done."""
        payload = _bytes_of(tensor.detach().to(self.carrier).resolve_conj().resolve_neg())
        if payload.numel() == 0:
            return None
        member = self.members[rank]
        with others_there(lambda: f"rank {self.own} has lost the way to rank {member}"):
            if member in self.peers:
                self.peers.send(payload, member, tag, self.timeout_s)
                return None
            return dist.isend(payload, member, tag=tag), payload

    def receive(self, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        """Start receiving into a contiguous buffer on the carrier; None when it is empty."""
        if buffer.numel() == 0:
            return None
        member = self.members[rank]
        with others_there(lambda: f"rank {self.own} has lost the way from rank {member}"):
            if member in self.peers:
                return self.peers.receive(_bytes_of(buffer), member, tag)
            return dist.irecv(_bytes_of(buffer), member, tag=tag)

    def broadcast(
        self, tensor: torch.Tensor, source: int, what: str, targets: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The tensor of one rank on others; every one passes a tensor of the same shape.

        Args:
            targets: the others; None for all.

        Point to point: a collective of gloo runs on a thread, which must end before the interpreter
        does (`topology.Collectives`).
        """
        if self.rank == source:
            if targets is None:
                targets = [rank for rank in range(self.size) if rank != source]
            sent = [(rank, self.send(tensor, rank, _RESULT_TAG)) for rank in targets]
            for rank, started in sent:
                self.finish(started, f"sending {what} to rank {self.members[rank]}")
            return tensor
        return self._received(tensor, source, _RESULT_TAG, what)

    def broadcast_object(self, value: T | None, source: int, what: str) -> T:
        """Rank `source`'s object on all ranks, by pickle: for what its user's program makes."""
        if self.rank != source:
            return cast(T, self.receive_object(source, what))
        self.send_object(value, [rank for rank in range(self.size) if rank != source], what)
        return cast(T, value)

    def gather_objects(self, value: T, what: str) -> list[T]:
        """The objects of all ranks, in their order, on rank 0; none on the others."""
        if self.rank != 0:
            self.send_object(value, [0], what)
            return []
        return [value, *(self.receive_object(rank, what) for rank in range(1, self.size))]

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all ranks by name, on rank 0's CPU; nothing on the others."""
        if self.rank != 0:
            self.send_object(list(tensors), [0], "names")
            for name, tensor in tensors.items():
                self.pass_on(tensor, self.rank, name)
            return {}
        result = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        for source in range(1, self.size):
            names: list[str] = self.receive_object(source, "names")
            for name in names:
                result.setdefault(name, self.pass_on(None, source, name).cpu())
        return result

    def pass_on(self, tensor: torch.Tensor | None, source: int, what: str) -> torch.Tensor:
        """A tensor of unknown shape from `source` to rank 0; called on these two ranks only."""
        if tensor is not None:
            self.send_object((tensor.dtype, tuple(tensor.shape)), [0], what)
            self._sent(tensor, 0, _RESULT_TAG, what)
            return tensor
        dtype, shape = self.receive_object(source, what)
        like = torch.empty(shape, dtype=dtype, device="meta")
        return self._received(like, source, _RESULT_TAG, what)

    def send_object(self, value: object, ranks: Sequence[int], what: str) -> None:
        """An object to some ranks, each of which calls `receive_object`."""
        if not ranks:
            return
        data = pickle.dumps(value)
        row = torch.zeros(max(_PACKET, 8 + len(data)), dtype=torch.uint8)
        row[: 8 + len(data)] = torch.frombuffer(
            bytearray(struct.pack("<q", len(data)) + data), dtype=torch.uint8
        )
        parts = row[:_PACKET], row[_PACKET:]
        sent = [(rank, self.send(part, rank, _RESULT_TAG)) for part in parts for rank in ranks]
        for rank, started in sent:
            self.finish(started, f"sending {what} to rank {self.members[rank]}")

    def receive_object(self, rank: int, what: str) -> Any:
        """What a rank sends by `send_object`."""

        def received(length: int) -> bytes:
            like = torch.empty(length, dtype=torch.uint8, device="meta")
            return bytes(self._received(like, rank, _RESULT_TAG, what).tolist())

        first = received(_PACKET)
        (length,) = struct.unpack_from("<q", first)
        rest = received(max(0, 8 + length - _PACKET))
        return pickle.loads((first + rest)[8 : 8 + length])

    def finish(self, started: Any, what: str) -> None:
        """Wait for what `send` or `receive` has started."""
        if started is not None:
            work = started[0] if isinstance(started, tuple) else started
            self.wait(work, lambda: what)

    def sum(
        self, tensor: torch.Tensor, what: str, numbers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The sum of a tensor over ranks, in their order: the same bits on each of them.

        Args:
            numbers: the ranks that call this; None for all.
        """
        return self._reduced(tensor, torch.add, what, numbers or range(self.size))

    def maximum(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """The largest of each element over all ranks, on each of them; nan if one is nan."""
        return self._reduced(tensor, torch.maximum, what, range(self.size))

    def gathered(self, tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, ...]:
        """The tensors of all ranks, in their order, on each of them; all of one shape."""
        row = torch.zeros((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        row[self.rank] = tensor
        return tuple(self.sum(row, what))

    def _reduced(
        self,
        tensor: torch.Tensor,
        reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        what: str,
        numbers: Sequence[int],
    ) -> torch.Tensor:
        """Point to point, by way of the first, so that the order is always the same."""
        first, *others = numbers
        if self.rank != first:
            self._sent(tensor, first, _SUM_TAG, what)
            return self._received(tensor, first, _SUM_TAG, what)
        for rank in others:
            found = self._received(tensor, rank, _SUM_TAG, what)
            tensor = reduce(tensor, found.to(tensor.device))
        for rank in others:
            self._sent(tensor, rank, _SUM_TAG, what)
        return tensor

    def _sent(self, tensor: torch.Tensor, rank: int, tag: int, what: str) -> None:
        started = self.send(tensor, rank, tag)
        self.finish(started, f"sending {what} to rank {self.members[rank]}")

    def _received(self, like: torch.Tensor, source: int, tag: int, what: str) -> torch.Tensor:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.carrier)
        started = self.receive(buffer, source, tag)
        self.finish(started, f"receiving {what} from rank {self.members[source]}")
        return buffer.to(self.device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a row of bytes: any dtype travels, whatever the backend knows."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
