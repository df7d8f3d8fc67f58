"""How long what crosses between stages is under way, measured by sending it to and fro."""

from __future__ import annotations

import math
import queue
import statistics
import time
from collections.abc import Callable

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


def link_seconds(pipe: Pipeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For every stage, seconds of one micro-batch on its way from other devices, and back.

    Every value is sent by itself while nothing else happens; every rank calls this. What comes from
    a stage of the same device takes no time.
    """
    spec, placement = pipe.spec, pipe.placement
    known: dict[tuple[int, int, int], float] = {}
    there, back = [0.0] * len(placement), [0.0] * len(placement)
    for crossing in crossings_for(spec, most_work(spec)):
        sender = placement[crossing.source]
        size = math.prod(crossing.shape) * crossing.dtype.itemsize
        for target in first_targets(crossing, placement):
            link = sender, placement[target], size
            if link[0] == link[1]:
                continue
            if link not in known:
                known[link] = _one_way(pipe, *link)
            there[target] += known[link]
            back[target] += known[link] if crossing.gradient else 0.0
    return tuple(there), tuple(back)


def _one_way(pipe: Pipeline, sender: int, receiver: int, size: int) -> float:
    """Half the time of a message to and fro."""
    runner = pipe.runner
    if isinstance(runner, DistributedRunner):
        return _between_processes(runner.network, sender, receiver, size)
    assert isinstance(runner, LocalRunner)
    return _between_threads(runner, sender, receiver, size)


def _between_threads(runner: LocalRunner, sender: int, receiver: int, size: int) -> float:
    inboxes: list[Inbox] = [queue.SimpleQueue() for _ in runner.devices]
    places = range(len(runner.devices))
    ends = {
        place: LocalEndpoint(place, inboxes, runner.devices, places) for place in (sender, receiver)
    }
    found: list[float] = []

    def messages(here: int, other: int, *, begins: bool) -> Outcome:
        device = runner.devices[here]
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        for number in range(WARM_UP + ROUNDS):
            sent, taken = Transfer("", number, here, other), Transfer("", number, other, here)
            start = time.perf_counter()
            if begins:
                ends[here].send(sent, tensor)
                ends[here].take(taken)
                _settle(device)
                found.append(time.perf_counter() - start)
            else:
                ends[here].take(taken)
                _settle(device)
                ends[here].send(sent, tensor)
        return Outcome()

    tasks: list[Callable[[], Outcome]] = [Outcome for _ in runner.devices]
    tasks[sender] = lambda: messages(sender, receiver, begins=True)
    tasks[receiver] = lambda: messages(receiver, sender, begins=False)
    runner.workers.run(tasks, lambda: None)
    return statistics.median(found[WARM_UP:]) / 2


def _between_processes(network: Network, sender: int, receiver: int, size: int) -> float:
    found: list[float] = []
    tensor = torch.zeros(size, dtype=torch.uint8, device=network.carrier)

    def send(other: int) -> None:
        network.finish(network.send(tensor, other, _TAG), "sending a measured message")

    def receive(other: int) -> None:
        network.finish(network.receive(tensor, other, _TAG), "at a measured message")

    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        if network.rank == sender:
            send(receiver)
            receive(receiver)
        elif network.rank == receiver:
            receive(sender)
            send(sender)
        _settle(network.device)
        found.append(time.perf_counter() - start)
    row = torch.tensor([statistics.median(found[WARM_UP:])], dtype=torch.float64)
    return float(network.broadcast(row.to(network.carrier), sender, "a measured time")) / 2


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
