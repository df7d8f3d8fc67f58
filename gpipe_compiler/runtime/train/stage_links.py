"""How long what crosses between stages is under way.

It is sent to and fro while nothing else happens. In the midst of a step it takes longer: its code
and its data have left the caches, and in threads whoever wakes up waits for the interpreter. What
was seen there (`stage_messages`) counts where it is more.
"""

from __future__ import annotations

import contextlib
import math
import queue
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch

from ..core.distributed import DistributedEndpoint, Network
from ..core.engine import Outcome
from ..core.local import Inbox, LocalEndpoint
from ..core.pipeline import Pipeline
from ..core.runners import DistributedRunner, LocalRunner
from ..core.transport import Endpoint
from ..core.wiring import crossings_for, most_work
from ..schedule.actions import SharedSum, Transfer
from ..schedule.lowering import first_targets
from ..spec import Crossing
from .stage_messages import MessageSeconds, MessageTimes
from .timed_steps import settle

WARM_UP = 3
ROUNDS = 15
_ROUNDS = (False,) * (WARM_UP + ROUNDS) + (True,) * (WARM_UP + ROUNDS)
"""Of messages to and fro, whether another one goes before it."""

MICROBATCHES = 2
"""One for the message that is waited for, one for the other."""


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


def link_seconds(pipe: Pipeline, seen: MessageTimes) -> LinkSeconds:
    """Send what crosses between devices to and fro; every rank calls this.

    Every value is sent by itself. What comes from a stage of the same device takes no time.

    Args:
        seen: what this process has seen of the same messages in steps.
    """
    spec, placement = pipe.spec, pipe.placement
    known: dict[tuple[int, int, int], MessageSeconds] = {}
    receive, gradient, forward, backward = ([0.0] * len(placement) for _ in range(4))
    for crossing in crossings_for(spec, most_work(spec)):
        sender = placement[crossing.source]
        size = math.prod(crossing.shape) * crossing.dtype.itemsize
        for target in first_targets(crossing, placement):
            link = sender, placement[target], size
            if link[0] == link[1]:
                continue
            if link not in known:
                known[link] = _message(pipe, crossing, target)
            message = seen.at_least(known[link], crossing.value, crossing.source, target)
            receive[target] += message.way_s
            forward[crossing.source] += message.send_s
            forward[target] += message.expect_s + message.take_s
            if crossing.gradient:
                message = seen.at_least(
                    known[link], crossing.value, target, crossing.source, gradient=True
                )
                gradient[target] += message.way_s
                backward[target] += message.send_s
                backward[crossing.source] += message.expect_s + message.take_s
    return LinkSeconds(tuple(receive), tuple(gradient), tuple(forward), tuple(backward))


class _Timer:
    """Medians of what happens again and again, the first times not counted."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._rows[what].append(time.perf_counter() - start)

    def median(self, what: str) -> float:
        """Of all times, or 0 where there was none."""
        return statistics.median(self._rows[what][WARM_UP:] or [0.0])


class _Exchange:
    """Messages of one value to and fro between two stages, over the endpoints of their devices."""

    def __init__(self, crossing: Crossing, target: int, size: int) -> None:
        self.crossing = crossing
        self.size = size
        there = crossing.value, crossing.source, target
        self._out, self._aside = (Transfer(there[0], m, *there[1:]) for m in range(MICROBATCHES))
        self._back = Transfer(crossing.value, 0, target, crossing.source, gradient=True)
        self.timer = _Timer()

    def begin(self, end: Endpoint, device: torch.device) -> None:
        """At the sender."""
        shape = self.crossing.shape_for(self.size, self.size)
        tensor = torch.zeros(shape, dtype=self.crossing.dtype, device=device)
        for aside in _ROUNDS:
            if aside:
                end.send(self._aside, tensor)
            with self.timer("both, one aside" if aside else "both"):
                with self.timer("send"):
                    end.send(self._out, tensor)
                with self.timer("expect"):
                    end.expect(self._back)
                end.take(self._back)
                settle(device)
        end.flush()

    def answer(self, end: Endpoint, device: torch.device) -> None:
        """At the receiver."""
        for aside in _ROUNDS:
            if aside:
                end.expect(self._aside)
            end.expect(self._out)
            tensor = end.take(self._out)
            if aside:
                # Sent before the other, so it is there.
                with self.timer("take"):
                    end.take(self._aside)
            settle(device)
            end.send(self._back, tensor)
        end.flush()

    def message(self, take_s: float) -> MessageSeconds:
        """What one takes, by the times of the sender: it goes and comes back in twice as much."""
        send_s, expect_s, both_s = map(self.timer.median, ("send", "expect", "both"))
        return MessageSeconds(send_s, expect_s, max(0.0, both_s / 2 - send_s - take_s), take_s)


def _message(pipe: Pipeline, crossing: Crossing, target: int) -> MessageSeconds:
    """A message of this value, sent to and fro."""
    runner = pipe.runner
    sender, receiver = pipe.placement[crossing.source], pipe.placement[target]
    exchange = _Exchange(crossing, target, pipe.spec.microbatch_size)
    if isinstance(runner, DistributedRunner):
        return _between_processes(runner.network, pipe.placement, exchange, (sender, receiver))
    assert isinstance(runner, LocalRunner)
    return _between_threads(runner, pipe.placement, exchange, (sender, receiver))


def _between_threads(
    runner: LocalRunner, placement: Sequence[int], exchange: _Exchange, ends: tuple[int, int]
) -> MessageSeconds:
    inboxes: list[Inbox] = [queue.SimpleQueue() for _ in runner.devices]

    def task(work: Callable[[Endpoint, torch.device], None], place: int) -> Callable[[], Outcome]:
        def run() -> Outcome:
            end = LocalEndpoint(place, inboxes, runner.devices, placement)
            work(end, runner.devices[place])
            return Outcome()

        return run

    tasks: list[Callable[[], Outcome]] = [Outcome for _ in runner.devices]
    for work, place in zip((exchange.begin, exchange.answer), ends, strict=True):
        tasks[place] = task(work, place)

    def abort() -> None:
        for inbox in inboxes:
            inbox.put(None)

    runner.workers.run(tasks, abort)
    return exchange.message(exchange.timer.median("take"))


def _between_processes(
    network: Network, placement: Sequence[int], exchange: _Exchange, ends: tuple[int, int]
) -> MessageSeconds:
    sender, receiver = ends
    if network.rank in ends:
        end = DistributedEndpoint(
            network,
            placement,
            [exchange.crossing],
            (exchange.size,) * MICROBATCHES,
            exchange.size,
            _no_sum,
        )
        (exchange.begin if network.rank == sender else exchange.answer)(end, network.device)
    take_s = torch.tensor([exchange.timer.median("take")], dtype=torch.float64)
    take_s = network.broadcast(take_s.to(network.carrier), receiver, "measured times")
    found = exchange.message(take_s.item())
    row = torch.tensor(astuple(found), dtype=torch.float64)
    told = network.broadcast(row.to(network.carrier), sender, "measured times")
    return MessageSeconds(*told.tolist())


def _no_sum(total: SharedSum) -> None:
    """Nothing is summed here."""
