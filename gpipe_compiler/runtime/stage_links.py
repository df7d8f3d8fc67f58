"""How long what crosses between stages is under way, measured by sending it to and fro."""

from __future__ import annotations

import contextlib
import math
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .distributed import Network
from .engine import Outcome
from .local import Inbox, LocalEndpoint
from .pipeline import Pipeline
from .runners import DistributedRunner, LocalRunner
from .schedule.actions import Transfer
from .schedule.lowering import first_targets
from .wiring import crossings_for, most_work

WARM_UP = 3
ROUNDS = 15
_TAG = 1 << 22


@dataclass(frozen=True)
class LinkSeconds:
    """Seconds that one micro-batch costs in transfers, for every stage.

    Attributes:
        receive_s, gradient_s: what it receives is on its way from other devices, its gradients on
            their way back.
        forward_s, backward_s: its device is at work on transfers, beside each forward and backward.
    """

    receive_s: tuple[float, ...]
    gradient_s: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Message:
    """Seconds of a message: to start sending it, to prepare its receipt, and on its way."""

    send_s: float
    expect_s: float
    way_s: float


def link_seconds(pipe: Pipeline) -> LinkSeconds:
    """Send what crosses between devices to and fro; every rank calls this.

    Every value is sent by itself while nothing else happens. What comes from a stage of the same
    device takes no time.
    """
    spec, placement = pipe.spec, pipe.placement
    known: dict[tuple[int, int, int], _Message] = {}
    receive, gradient, forward, backward = ([0.0] * len(placement) for _ in range(4))
    for crossing in crossings_for(spec, most_work(spec)):
        sender = placement[crossing.source]
        size = math.prod(crossing.shape) * crossing.dtype.itemsize
        for target in first_targets(crossing, placement):
            link = sender, placement[target], size
            if link[0] == link[1]:
                continue
            if link not in known:
                known[link] = _message(pipe, *link)
            message = known[link]
            receive[target] += message.way_s
            forward[crossing.source] += message.send_s
            forward[target] += message.expect_s
            if crossing.gradient:
                gradient[target] += message.way_s
                backward[target] += message.send_s
                backward[crossing.source] += message.expect_s
    return LinkSeconds(tuple(receive), tuple(gradient), tuple(forward), tuple(backward))


def _message(pipe: Pipeline, sender: int, receiver: int, size: int) -> _Message:
    """A message of so many bytes, sent to and fro."""
    runner = pipe.runner
    if isinstance(runner, DistributedRunner):
        return _between_processes(runner.network, sender, receiver, size)
    assert isinstance(runner, LocalRunner)
    return _between_threads(runner, sender, receiver, size)


class _Timer:
    """Medians of what happens again and again, the first times not counted."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {"send": [], "expect": [], "both": []}

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.rows[what].append(time.perf_counter() - start)

    def message(self) -> _Message:
        """Half of the time to and fro is a way, and starting to send."""
        send_s, expect_s, both_s = (
            statistics.median(self.rows[what][WARM_UP:] or [0.0])
            for what in ("send", "expect", "both")
        )
        return _Message(send_s, expect_s, max(0.0, both_s / 2 - send_s))


def _between_threads(runner: LocalRunner, sender: int, receiver: int, size: int) -> _Message:
    inboxes: list[Inbox] = [queue.SimpleQueue() for _ in runner.devices]
    places = range(len(runner.devices))
    ends = {
        place: LocalEndpoint(place, inboxes, runner.devices, places) for place in (sender, receiver)
    }
    timer = _Timer()

    def begin() -> Outcome:
        tensor = torch.zeros(size, dtype=torch.uint8, device=runner.devices[sender])
        for number in range(WARM_UP + ROUNDS):
            with timer("both"):
                with timer("send"):
                    ends[sender].send(Transfer("", number, sender, receiver), tensor)
                ends[sender].take(Transfer("", number, receiver, sender))
                _settle(tensor.device)
        return Outcome()

    def answer() -> Outcome:
        for number in range(WARM_UP + ROUNDS):
            tensor = ends[receiver].take(Transfer("", number, sender, receiver))
            _settle(runner.devices[receiver])
            ends[receiver].send(Transfer("", number, receiver, sender), tensor)
        return Outcome()

    tasks: list[Callable[[], Outcome]] = [Outcome for _ in runner.devices]
    tasks[sender], tasks[receiver] = begin, answer
    runner.workers.run(tasks, lambda: None)
    return timer.message()


def _between_processes(network: Network, sender: int, receiver: int, size: int) -> _Message:
    timer = _Timer()
    tensor = torch.zeros(size, dtype=torch.uint8, device=network.carrier)
    for _ in range(WARM_UP + ROUNDS):
        with timer("both"):
            if network.rank == sender:
                # In the order of the other end: NCCL starts them one after the other.
                with timer("send"):
                    started = network.send(tensor, receiver, _TAG)
                with timer("expect"):
                    answer = network.receive(torch.empty_like(tensor), receiver, _TAG)
                network.finish(started, "sending a measured message")
                network.finish(answer, "at the answer to a measured message")
            elif network.rank == receiver:
                network.finish(network.receive(tensor, sender, _TAG), "at a measured message")
                network.finish(network.send(tensor, sender, _TAG), "answering a measured message")
            _settle(network.device)
    found = timer.message()
    row = torch.tensor([found.send_s, found.expect_s, found.way_s], dtype=torch.float64)
    told = network.broadcast(row.to(network.carrier), sender, "measured times")
    return _Message(*told.tolist())


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
