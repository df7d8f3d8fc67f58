"""How values get from one device of a pipeline to another: threads of a process, or processes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from ..errors import PipelineError, TransportError
from ..schedule.actions import SharedSum, Transfer
from ..sizes import Sizes
from ..spec import Crossing
from .devices import intra_op_threads
from .distributed import Network

T = TypeVar("T")


class Endpoint(Protocol):
    """One device's access to the others, for one run of its program.

    Nothing here waits but `take`, `flush` and `exchange`. Both ends go through their transfers in
    the order of the lowered program.
    """

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        """Start sending; None stands for a gradient of zeros."""

    def expect(self, transfer: Transfer) -> None:
        """Get ready for a value that is to come; called where the program receives it."""

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        """Wait for the value; None is a gradient of zeros.

        Raises:
            TransportError: when it does not come.
        """

    def exchange(self, total: SharedSum) -> None:
        """Sum the gradients of a shared parameter over the owners' devices."""

    def flush(self) -> None:
        """Wait until all that was sent has left."""


class _AbortedError(PipelineError):
    """Another worker has failed; this one stops without a word of its own."""


_Message = tuple[Transfer, "torch.Tensor | None"] | None
"""What lies in an inbox; None means that another worker has failed."""

Inbox: TypeAlias = "queue.SimpleQueue[_Message]"
"""Where a worker finds what the others hand it."""


@dataclass(eq=False)
class LocalEndpoint:
    """One worker's inbox, and the way to the others'.

    A tensor is handed over as it is, or copied once where the receiver computes elsewhere. Nobody
    writes to a value that has crossed, so both sides may hold the same memory.
    """

    index: int
    inboxes: Sequence[Inbox]
    devices: Sequence[torch.device]
    placement: Sequence[int]
    arrived: dict[Transfer, torch.Tensor | None] = field(default_factory=dict, init=False)

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        """Hand a tensor to the receiver, on the receiver's device."""
        target = self.placement[transfer.target]
        if tensor is not None and tensor.device != self.devices[target]:
            # Only a copy to an accelerator may go on behind our back: the CPU would read too soon.
            tensor = tensor.to(
                self.devices[target], non_blocking=self.devices[target].type != "cpu"
            )
        self.inboxes[target].put((transfer, tensor))

    def expect(self, transfer: Transfer) -> None:
        """Nothing to prepare."""

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        """Wait for a tensor; others that come first are laid aside."""
        while transfer not in self.arrived:
            message = self.inboxes[self.index].get()
            if message is None:
                raise _AbortedError("another worker has failed")
            self.arrived[message[0]] = message[1]
        return self.arrived.pop(transfer)

    def exchange(self, total: SharedSum) -> None:
        """Nothing: after the run, one thread sums the gradients of all owners of this process."""

    def flush(self) -> None:
        """Nothing is under way."""


class Workers(Generic[T]):
    """Threads that run one task each per round; `close` joins them.

    Args:
        devices: where each of them computes; a single worker is the calling thread itself.
        threads: intra-op threads of each on the CPU, None to leave torch's setting.
    """

    def __init__(self, devices: Sequence[torch.device], threads: int | None) -> None:
        self.threads = threads
        self.pools = [
            ThreadPoolExecutor(1, f"stage-{i}", _begin, (device, threads))
            for i, device in enumerate(devices)
            if len(devices) > 1
        ]

    def run(self, tasks: Sequence[Callable[[], T]], abort: Callable[[], None]) -> list[T]:
        """Run all tasks at once and return what they return.

        Args:
            abort: makes every task that waits for another one end.

        Raises:
            the first exception of a task, with its traceback, after all tasks have ended.
        """
        if not self.pools:
            return [task() for task in tasks]
        failures: list[BaseException] = []

        def run(task: Callable[[], T]) -> T:
            try:
                return task()
            except BaseException as error:
                if not isinstance(error, _AbortedError):
                    failures.append(error)
                    abort()
                raise

        futures: list[Future[T]] = []
        with intra_op_threads(self.threads):
            try:
                for pool, task in zip(self.pools, tasks, strict=True):
                    futures.append(pool.submit(run, task))
                wait(futures)
            except BaseException as error:  # Ctrl-C while waiting: the threads have to end first
                abort()
                wait(futures)
                if isinstance(error, RuntimeError):  # as `submit` raises it
                    raise TransportError("the pipeline is closed") from error
                raise
        if failures:
            raise failures[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown()


def _begin(device: torch.device, threads: int | None) -> None:
    if device.type == "cuda":
        # What the model makes on "cuda" is to be on this GPU.
        torch.cuda.set_device(device)
    if threads is not None:
        torch.set_num_threads(threads)


CrossingTypes: TypeAlias = dict[tuple[str, int], torch.dtype]
"""The types of boundary values, by name and by the rank that they go to or come from."""


@dataclass(eq=False)
class DistributedEndpoint:
    """One rank's transfers for one run of its program.

    Receives are posted where the program has them, so any two ranks start what passes between them
    in the same order, as channels that deliver in order demand.

    What autocast makes of an op depends on the kind of device: a LayerNorm gives fp32 on CUDA and
    16 bits on the CPU. So under it a rank first tells another of which type a value is that it has
    not sent it before; gradients are of the types of their values.

    Args:
        types: those that this rank has told or been told; None where they are as planned.
        samples: in each micro-batch of this run.
    """

    network: Network
    placement: Sequence[int]
    crossings: Mapping[str, Crossing]
    types: CrossingTypes | None
    samples: Sequence[int]
    sizes: Sequence[Sizes]
    microbatch_size: int
    sum_gradients: Callable[[SharedSum], None]
    sent: list[tuple[Any, torch.Tensor, Transfer]] = field(default_factory=list, init=False)
    posted: dict[Transfer, tuple[Any, torch.Tensor]] = field(default_factory=dict, init=False)
    tags: dict[tuple[int, int], int] = field(default_factory=dict, init=False)

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        target = self.placement[transfer.target]
        if self.types is not None and (transfer.value, target) not in self.types:
            assert tensor is not None  # a gradient comes after its value
            self.types[transfer.value, target] = tensor.dtype
            self.network.send_object(tensor.dtype, [target], f"the type of {transfer.value}")
        shape, dtype = self._facts(transfer, target)
        if tensor is None:
            tensor = torch.zeros(shape, dtype=dtype, device=self.network.carrier)
        elif tensor.dtype != dtype or tensor.shape != shape:
            raise PipelineError(
                f"{transfer} is {tensor.dtype} {tuple(tensor.shape)}, planned as {dtype} {shape}",
                hint="the input differs from the one compiled for in more than what is free",
            )
        started = self.network.send(tensor, target, self._tag(self.network.rank, target))
        self._let_go()
        if started is not None:
            self.sent.append((*started, transfer))

    def expect(self, transfer: Transfer) -> None:
        """Post the receive, into memory of the planned size."""
        source = self.placement[transfer.source]
        if self.types is not None and (transfer.value, source) not in self.types:
            what = f"the type of {transfer.value}"
            self.types[transfer.value, source] = self.network.receive_object(source, what)
        shape, dtype = self._facts(transfer, source)
        buffer = torch.empty(shape, dtype=dtype, device=self.network.carrier)
        work = self.network.receive(buffer, source, self._tag(source, self.network.rank))
        self.posted[transfer] = work, buffer

    def take(self, transfer: Transfer) -> torch.Tensor:
        self._let_go()
        work, buffer = self.posted.pop(transfer)
        if work is not None:
            rank = self.network.members[self.placement[transfer.source]]
            self.network.wait(work, lambda: f"at receive {transfer} from rank {rank}")
        return buffer.to(self.network.device)

    def exchange(self, total: SharedSum) -> None:
        self.sum_gradients(total)

    def flush(self) -> None:
        for work, _, transfer in self.sent:
            rank = self.network.members[self.placement[transfer.target]]
            self.network.wait(work, lambda t=transfer, r=rank: f"at send {t} to rank {r}")  # type: ignore[misc]  # defaults bind the loop's values
        self.sent.clear()

    def _let_go(self) -> None:
        """Hold no longer what has left in the meantime."""
        self.sent = [item for item in self.sent if not item[0].is_completed()]

    def _facts(self, transfer: Transfer, rank: int) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and type of what goes to a rank, or comes from it."""
        crossing, m = self.crossings[transfer.value], transfer.microbatch
        shape = crossing.shape_for(self.samples[m], self.microbatch_size, self.sizes[m])
        return shape, crossing.dtype if self.types is None else self.types[transfer.value, rank]

    def _tag(self, source: int, target: int) -> int:
        tag = self.tags.get((source, target), 0)
        self.tags[source, target] = tag + 1
        return tag
