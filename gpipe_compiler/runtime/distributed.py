"""The distributed transport: torch.distributed point to point, one process per device."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import PipelineError, TransportError
from .schedule.actions import SharedSum, Transfer
from .spec import Crossing

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
    """The ranks of a pipeline, this process being one of them.

    Attributes:
        device: where this rank computes.
        timeout_s: seconds until a value that does not come is given up.
        owns_group: whether the process group is to be taken down by `close`.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    owns_group: bool
    by_host: bool

    @classmethod
    def join(cls, device: torch.device | None, timeout_s: float) -> Network:
        """Join the process group, making it unless the caller has.

        NCCL where ranks compute on GPUs, gloo elsewhere.
        """
        if device is None:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            device = torch.device("cuda", local % count) if count else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        owns = not dist.is_initialized()
        if owns:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        backend = dist.get_backend()
        return cls(
            dist.get_rank(), dist.get_world_size(), device, timeout_s, owns, "nccl" not in backend
        )

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
                f"rank {self.rank} gave up {what()}: {_first_line(error)}",
                hint="another rank has ended or is stuck; its own message says why",
            ) from error

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Any, torch.Tensor] | None:
        """Start sending; keep what is returned until it has been waited for. Nothing: no work."""
        payload = _bytes_of(tensor.detach().to(self.carrier).resolve_conj().resolve_neg())
        if payload.numel() == 0:
            return None
        return self._start(lambda: dist.isend(payload, rank, tag=tag), rank, "to"), payload

    def receive(self, buffer: torch.Tensor, rank: int, tag: int) -> Any:
        """Start receiving into a contiguous buffer on the carrier; None when it is empty."""
        if buffer.numel() == 0:
            return None
        return self._start(lambda: dist.irecv(_bytes_of(buffer), rank, tag=tag), rank, "from")

    def _start(self, call: Callable[[], Any], rank: int, direction: str) -> Any:
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {self.rank} has lost the way {direction} rank {rank}: {_first_line(error)}",
                hint="another rank has ended; its own message says why",
            ) from error

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> torch.Tensor:
        """The tensor of one rank on all ranks; every rank passes one of the same shape.

        Point to point: collectives of gloo run on threads that may outlive the interpreter.
        """
        if self.rank == source:
            others = [rank for rank in range(self.size) if rank != source]
            for started in [self.send(tensor, rank, _RESULT_TAG) for rank in others]:
                self.finish(started, f"sending {what}")
            return tensor
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.carrier)
        started = self.receive(buffer, source, _RESULT_TAG)
        self.finish(started, f"at {what} from rank {source}")
        return buffer.to(self.device)

    def share_scalar(self, scalar: torch.Tensor | None, source: int, what: str) -> torch.Tensor:
        """A scalar of one rank on all ranks, in its own dtype."""
        facts = [0.0, 0.0] if scalar is None else [scalar.item(), DTYPES.index(scalar.dtype)]
        value, dtype = self.broadcast(torch.tensor(facts, dtype=torch.float64), source, what)
        loss: torch.Tensor = value.to(DTYPES[int(dtype)])
        return loss

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
            self.finish(self.send(header, 0, _RESULT_TAG), f"sending {what}")
            self.finish(self.send(tensor, 0, _RESULT_TAG), f"sending {what}")
            return tensor
        self.finish(
            self.receive(header, source, _RESULT_TAG), f"receiving {what} from rank {source}"
        )
        number, dimensions, *sizes = header.tolist()
        buffer = torch.empty(sizes[:dimensions], dtype=DTYPES[number], device=self.carrier)
        self.finish(
            self.receive(buffer, source, _RESULT_TAG), f"receiving {what} from rank {source}"
        )
        return buffer.to(self.device)

    def finish(self, started: Any, what: str) -> None:
        """Wait for what `send` or `receive` has started."""
        if started is not None:
            work = started[0] if isinstance(started, tuple) else started
            self.wait(work, lambda: what)

    def close(self) -> None:
        """Leave the process group, if this network made it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


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
        """Start sending; what has left in the meantime is let go."""
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
        self.sent = [item for item in self.sent if not item[0].is_completed()]
        if started is not None:
            self.sent.append((*started, transfer))

    def expect(self, transfer: Transfer) -> None:
        """Post the receive, into memory of the planned size."""
        shape, dtype = self._facts(transfer)
        source = self.placement[transfer.source]
        buffer = torch.empty(shape, dtype=dtype, device=self.network.carrier)
        work = self.network.receive(buffer, source, self._tag(source, self.network.rank))
        self.posted[transfer] = work, buffer

    def take(self, transfer: Transfer) -> torch.Tensor:
        """Wait for a value."""
        work, buffer = self.posted.pop(transfer)
        if work is not None:
            self.network.wait(work, lambda: f"at {_receiving(transfer, self.placement)}")
        return buffer.to(self.network.device)

    def exchange(self, total: SharedSum) -> None:
        """Sum a shared gradient with the other owners."""
        self.sum_gradients(total)

    def flush(self) -> None:
        """Wait until everything has left."""
        for work, _, transfer in self.sent:
            rank = self.placement[transfer.target]
            self.network.wait(work, lambda t=transfer, r=rank: f"at send {t} to rank {r}")  # type: ignore[misc]  # defaults bind the loop's values
        self.sent.clear()

    def _facts(self, transfer: Transfer) -> tuple[tuple[int, ...], torch.dtype]:
        crossing = self.crossings[transfer.value]
        shape = crossing.shape_for(self.sizes[transfer.microbatch], self.microbatch_size)
        return shape, crossing.dtype

    def _tag(self, source: int, target: int) -> int:
        tag = self.tags.get((source, target), 0)
        self.tags[source, target] = tag + 1
        return tag


def sum_over_owners(
    network: Network, ranks: Sequence[int], gradient: torch.Tensor, name: str
) -> torch.Tensor:
    """The sum of a tensor over some ranks, in their order, the same bits on each of them."""
    first, *others = ranks
    what = f"the gradient of {name}"
    if network.rank != first:
        network.finish(network.send(gradient, first, _SUM_TAG), f"sending {what} to rank {first}")
        buffer = torch.empty(gradient.shape, dtype=gradient.dtype, device=network.carrier)
        network.finish(
            network.receive(buffer, first, _SUM_TAG), f"receiving {what} from rank {first}"
        )
        return buffer.to(network.device)
    for rank in others:
        buffer = torch.empty(gradient.shape, dtype=gradient.dtype, device=network.carrier)
        network.finish(
            network.receive(buffer, rank, _SUM_TAG), f"receiving {what} from rank {rank}"
        )
        gradient = gradient + buffer.to(gradient.device)
    for rank in others:
        network.finish(network.send(gradient, rank, _SUM_TAG), f"sending {what} to rank {rank}")
    return gradient


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a row of bytes: any dtype travels, whatever the backend knows."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _receiving(transfer: Transfer, placement: Sequence[int]) -> str:
    return f"receive {transfer} from rank {placement[transfer.source]}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
