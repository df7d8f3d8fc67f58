"""The distributed transport: torch.distributed point to point, one process per device."""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import PipelineError, TransportError
from ..schedule.actions import SharedSum, Transfer
from ..spec import Crossing
from .same_host import Peers, join_peers

T = TypeVar("T")

_SUM_TAG = 1 << 20

_RESULT_TAG = 1 << 21

_PACKET = 1024
"""Bytes of the first message of an object, which most objects fit into."""


def launched() -> bool:
    """Whether torchrun (or the like) started this process as one of several."""
    return dist.is_available() and (
        dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    )


@dataclass(frozen=True)
class Network:
    """Some of the ranks that torchrun started, in order; this process is one of them.

    Those of a pipeline, or those that hold the same device in every replica, or all.

    Attributes:
        members: their global ranks. Everything else here numbers them from 0, in this order;
            messages name global ranks.
        rank: this process's number among them.
        device: where this rank computes.
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
        try:
            peers = join_peers(rank, size) if by_host else Peers({})
        except RuntimeError as error:
            raise TransportError(
                f"rank {rank} does not find the others: {_first_line(error)}",
                hint="another rank has ended; its own message says why",
            ) from error
        return cls(tuple(range(size)), rank, device, timeout_s, by_host, peers)

    def among(self, members: Sequence[int]) -> Network:
        """The network of some ranks, by global rank, with this one among them."""
        return dataclasses.replace(self, members=tuple(members), rank=members.index(self.own))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.members)

    @property
    def own(self) -> int:
        """This process's global rank."""
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
        try:
            if self.by_host:
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                work.wait()
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {self.own} gave up {what()}: {_first_line(error)}",
                hint="another rank has ended or is stuck; its own message says why",
            ) from error

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Any, torch.Tensor] | None:
        """Start sending; keep what is returned until it has been waited for. Nothing: no work."""
        payload = _bytes_of(tensor.detach().to(self.carrier).resolve_conj().resolve_neg())
        if payload.numel() == 0:
            return None
        return self._start(
            lambda: self._send(payload, self.members[rank], tag), rank, "to"
        ), payload

    def receive(self, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        """Start receiving into a contiguous buffer on the carrier; None when it is empty."""
        if buffer.numel() == 0:
            return None
        return self._start(
            lambda: self._receive(_bytes_of(buffer), self.members[rank], tag), rank, "from"
        )

    def _send(self, payload: torch.Tensor, member: int, tag: int) -> Any:
        if member in self.peers:
            return self.peers.send(payload, member, tag, self.timeout_s)
        return dist.isend(payload, member, tag=tag)

    def _receive(self, buffer: torch.Tensor, member: int, tag: int) -> Any:
        if member in self.peers:
            return self.peers.receive(buffer, member, tag)
        return dist.irecv(buffer, member, tag=tag)

    def _start(self, call: Callable[[], Any], rank: int, direction: str) -> Any:
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {self.own} has lost the way {direction} rank {self.members[rank]}: "
                f"{_first_line(error)}",
                hint="another rank has ended; its own message says why",
            ) from error

    def broadcast(
        self, tensor: torch.Tensor, source: int, what: str, targets: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The tensor of one rank on others; every one passes a tensor of the same shape.

        Args:
            targets: the others; None for all.

        Point to point: a collective of gloo runs on a thread, which must end before the interpreter
        does (`replicas.Collectives`).
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
            return cast(T, self._receive_object(source, what))
        self._send_object(value, [rank for rank in range(self.size) if rank != source], what)
        return cast(T, value)

    def gather_objects(self, value: T, what: str) -> list[T]:
        """The objects of all ranks, in their order, on rank 0; none on the others."""
        if self.rank != 0:
            self._send_object(value, [0], what)
            return []
        return [value, *(self._receive_object(rank, what) for rank in range(1, self.size))]

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all ranks by name, on rank 0's CPU; nothing on the others."""
        if self.rank != 0:
            self._send_object(list(tensors), [0], "names")
            for name, tensor in tensors.items():
                self.pass_on(tensor, self.rank, name)
            return {}
        result = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        for source in range(1, self.size):
            names: list[str] = self._receive_object(source, "names")
            for name in names:
                result.setdefault(name, self.pass_on(None, source, name).cpu())
        return result

    def pass_on(self, tensor: torch.Tensor | None, source: int, what: str) -> torch.Tensor:
        """A tensor of unknown shape from `source` to rank 0; called on these two ranks only."""
        if tensor is not None:
            self._send_object((tensor.dtype, tuple(tensor.shape)), [0], what)
            self._sent(tensor, 0, _RESULT_TAG, what)
            return tensor
        dtype, shape = self._receive_object(source, what)
        like = torch.empty(shape, dtype=dtype, device="meta")
        return self._received(like, source, _RESULT_TAG, what)

    def _send_object(self, value: object, ranks: Sequence[int], what: str) -> None:
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

    def _receive_object(self, rank: int, what: str) -> Any:
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


class DistributedEndpoint:
    """One rank's transfers for one run of its program.

    Receives are posted where the program has them, so any two ranks start what passes between them
    in the same order, as channels that deliver in order demand.

    Args:
        sizes: samples in each micro-batch of this run.
    """

    def __init__(
        self,
        network: Network,
        placement: Sequence[int],
        crossings: Sequence[Crossing],
        sizes: Sequence[int],
        microbatch_size: int,
        sum_gradients: Callable[[SharedSum], None],
    ) -> None:
        self.network = network
        self.placement = placement
        self.crossings = {crossing.value: crossing for crossing in crossings}
        self.sizes = sizes
        self.microbatch_size = microbatch_size
        self.sum_gradients = sum_gradients
        self.sent: list[tuple[Any, torch.Tensor, Transfer]] = []
        self.posted: dict[Transfer, tuple[Any, torch.Tensor]] = {}
        self.tags: dict[tuple[int, int], int] = {}

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        """Start sending."""
        shape, dtype = self._facts(transfer)
        if tensor is None:
            tensor = torch.zeros(shape, dtype=dtype, device=self.network.carrier)
        elif tensor.dtype != dtype or tensor.shape != shape:
            raise PipelineError(
                f"{transfer} is {tensor.dtype} {tuple(tensor.shape)}, planned as {dtype} {shape}",
                hint="the input differs from the one compiled for in more than its batch size",
            )
        target = self.placement[transfer.target]
        started = self.network.send(tensor, target, self._tag(self.network.rank, target))
        self._let_go()
        if started is not None:
            self.sent.append((*started, transfer))

    def expect(self, transfer: Transfer) -> None:
        """Post the receive, into memory of the planned size."""
        shape, dtype = self._facts(transfer)
        source = self.placement[transfer.source]
        buffer = torch.empty(shape, dtype=dtype, device=self.network.carrier)
        work = self.network.receive(buffer, source, self._tag(source, self.network.rank))
        self.posted[transfer] = work, buffer

    def here(self, transfer: Transfer) -> bool:
        """Whether an expected value has come."""
        work, _ = self.posted[transfer]
        return work is None or bool(work.is_completed())

    def take(self, transfer: Transfer) -> torch.Tensor:
        """Wait for a value."""
        self._let_go()
        work, buffer = self.posted.pop(transfer)
        if work is not None:
            rank = self.network.members[self.placement[transfer.source]]
            self.network.wait(work, lambda: f"at receive {transfer} from rank {rank}")
        return buffer.to(self.network.device)

    def exchange(self, total: SharedSum) -> None:
        """Sum a shared gradient with the other owners."""
        self.sum_gradients(total)

    def flush(self) -> None:
        """Wait until everything has left."""
        for work, _, transfer in self.sent:
            rank = self.network.members[self.placement[transfer.target]]
            self.network.wait(work, lambda t=transfer, r=rank: f"at send {t} to rank {r}")  # type: ignore[misc]  # defaults bind the loop's values
        self.sent.clear()

    def _let_go(self) -> None:
        """Hold no longer what has left in the meantime."""
        self.sent = [item for item in self.sent if not item[0].is_completed()]

    def _facts(self, transfer: Transfer) -> tuple[tuple[int, ...], torch.dtype]:
        crossing = self.crossings[transfer.value]
        shape = crossing.shape_for(self.sizes[transfer.microbatch], self.microbatch_size)
        return shape, crossing.dtype

    def _tag(self, source: int, target: int) -> int:
        tag = self.tags.get((source, target), 0)
        self.tags[source, target] = tag + 1
        return tag


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a row of bytes: any dtype travels, whatever the backend knows."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


OverRanks = Callable[[torch.Tensor, str], torch.Tensor]
"""A small tensor summed over all ranks, the same bits on each; with words for who waits in vain."""


def alone(tensor: torch.Tensor, _what: str) -> torch.Tensor:
    """What `OverRanks` comes to for a single process."""
    return tensor
