"""What messages cost the devices of a pipeline in the midst of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..schedule.actions import Transfer


@dataclass(frozen=True, slots=True)
class MessageSeconds:
    """Seconds of a message: to start sending it, to prepare its receipt, on its way, and to take it
    once it is there."""

    send_s: float
    expect_s: float
    way_s: float
    take_s: float


_Times = dict[Transfer, list[float]]
"""By message, of whichever micro-batch."""


class MessageTimes:
    """What the devices of this process have done with messages, step after step.

    How long one is under way is only seen in threads, where sender and receiver are in one process.
    """

    def __init__(self) -> None:
        self._begun: dict[Transfer, float] = {}
        self._sends: _Times = defaultdict(list)
        self._expects: _Times = defaultdict(list)
        self._takes: _Times = defaultdict(list)
        self._ways: _Times = defaultdict(list)

    def clear(self) -> None:
        """Forget what was seen, as warming up is no measure."""
        for times in (self._sends, self._expects, self._takes, self._ways):
            times.clear()

    @contextlib.contextmanager
    def sending(self, transfer: Transfer) -> Iterator[None]:
        """Around the start of a message."""
        self._begun[transfer] = start = time.perf_counter()
        yield
        self._sends[_any(transfer)].append(time.perf_counter() - start)

    @contextlib.contextmanager
    def expecting(self, transfer: Transfer) -> Iterator[None]:
        """Around what prepares its receipt."""
        start = time.perf_counter()
        yield
        self._expects[_any(transfer)].append(time.perf_counter() - start)

    @contextlib.contextmanager
    def taking(self, transfer: Transfer, *, here: bool) -> Iterator[None]:
        """Around its receipt.

        Args:
            here: whether it need not be waited for.
        """
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        if here:
            self._takes[_any(transfer)].append(end - start)
        elif transfer in self._begun:
            self._ways[_any(transfer)].append(end - self._begun[transfer])

    def at_least(
        self, least: MessageSeconds, value: str, source: int, target: int, *, gradient: bool = False
    ) -> MessageSeconds:
        """What a message costs: the median of what was seen of it here, where that is more.

        Args:
            value, source, target, gradient: as a `Transfer` has them.
        """
        message = Transfer(value, 0, source, target, gradient=gradient)
        send_s = max(least.send_s, _median(self._sends, message))
        take_s = max(least.take_s, _median(self._takes, message))
        return MessageSeconds(
            send_s,
            max(least.expect_s, _median(self._expects, message)),
            max(least.way_s, _median(self._ways, message) - send_s - take_s),
            take_s,
        )


def _any(transfer: Transfer) -> Transfer:
    return dataclasses.replace(transfer, microbatch=0)


def _median(times: Mapping[Transfer, Sequence[float]], message: Transfer) -> float:
    """0 where nothing was seen."""
    return statistics.median(times.get(message) or [0.0])
