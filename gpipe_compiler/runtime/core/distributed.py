"""The distributed transport: torch.distributed point to point, one process per device."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import PipelineError, TransportError
from ..schedule.actions import SharedSum, Transfer
from ..spec import Crossing
from .same_host import Peers, join_peers

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""What may travel, by the number that announces it."""

MAX_DIMENSIONS = 12

_SUM_TAG = 1 << 20

_RESULT_TAG = 1 << 21


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
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.carrier)
        started = self.receive(buffer, source, _RESULT_TAG)
        self.finish(started, f"at {what} from rank {self.members[source]}")
        return buffer.to(self.device)

    def share_row(
        self, row: torch.Tensor | None, length: int, source: int, what: str
    ) -> torch.Tensor:
        """A row of numbers of one rank on all ranks, in its own dtype."""
        facts = torch.zeros(length + 1, dtype=torch.float64)
        if row is not None:
            facts = torch.tensor([*row.tolist(), DTYPES.index(row.dtype)], dtype=torch.float64)
        *_, dtype = facts = self.broadcast(facts, source, what)
        return facts[:-1].to(self.device, DTYPES[int(dtype)])

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all ranks by name, on rank 0's CPU; nothing on the others."""
        if self.rank != 0:
            names = json.dumps(list(tensors)).encode()
            self.pass_on(torch.tensor(list(names), dtype=torch.uint8), self.rank, "names")
            for name, tensor in tensors.items():
                self.pass_on(tensor, self.rank, name)
            return {}
        result = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        for source in range(1, self.size):
            names = bytes(self.pass_on(None, source, "names").tolist())
            for name in json.loads(names):
                result.setdefault(name, self.pass_on(None, source, name).cpu())
        return result

    def pass_on(self, tensor: torch.Tensor | None, source: int, what: str) -> torch.Tensor:
        """A tensor of unknown shape from `source` to rank 0; called on these two ranks only."""
        header = torch.zeros(2 + MAX_DIMENSIONS, dtype=torch.int64, device=self.carrier)
        if tensor is not None:
            facts = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            header[: len(facts)] = torch.tensor(facts)
            self.finish(
                self.send(header, 0, _RESULT_TAG), f"sending {what} to rank {self.members[0]}"
            )
            self.finish(
                self.send(tensor, 0, _RESULT_TAG), f"sending {what} to rank {self.members[0]}"
            )
            return tensor
        self.finish(
            self.receive(header, source, _RESULT_TAG),
            f"receiving {what} from rank {self.members[source]}",
        )
        number, dimensions, *sizes = header.tolist()
        buffer = torch.empty(sizes[:dimensions], dtype=DTYPES[number], device=self.carrier)
        self.finish(
            self.receive(buffer, source, _RESULT_TAG),
            f"receiving {what} from rank {self.members[source]}",
        )
        return buffer.to(self.device)

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
            self.finish(
                self.send(tensor, first, _SUM_TAG), f"sending {what} to rank {self.members[first]}"
            )
            return self._received(tensor, first, what)
        for rank in others:
            tensor = reduce(tensor, self._received(tensor, rank, what).to(tensor.device))
        for rank in others:
            self.finish(
                self.send(tensor, rank, _SUM_TAG), f"sending {what} to rank {self.members[rank]}"
            )
        return tensor

    def _received(self, like: torch.Tensor, source: int, what: str) -> torch.Tensor:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.carrier)
        started = self.receive(buffer, source, _SUM_TAG)
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
