"""The devices of a pipeline in one order, as the stages see them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpipe_compiler.cluster import NO_LINK, Link
from gpipe_compiler.passes.cut.setting import Seat, Setting
from gpipe_compiler.simulate.in_flight import Load

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageRates:
    """What the seconds of a stage follow from, beside the nodes in it.

    Attributes:
        kind: of its device.
        receives: the fastest link from any stage before it, `sends` that to any stage after it.
        update_s_per_byte, update_latency_s: as in `Seat`.
    """

    kind: int
    receives: Link
    sends: Link
    update_s_per_byte: float
    update_latency_s: float


@dataclass(frozen=True, eq=False)
class DeviceOrder:
    """One order of devices.

    Attributes:
        seats: which seat of the setting each device of the pipeline is; empty for the best of all
            in every place, which no order is slower or smaller than.
        devices: the same seats themselves.
        placement: the device of every stage.
        links: between any two devices.
        loads: of every device; empty where memory does not matter.
        again: for every stage, 1 where its times count with computing again, else 0.
        split: whether the weights' part of a backward comes later.
    """

    seats: tuple[int, ...]
    devices: tuple[Seat, ...]
    placement: tuple[int, ...]
    links: tuple[tuple[Link, ...], ...]
    loads: tuple[Load, ...]
    again: Floats
    split: bool

    @classmethod
    def of(
        cls, setting: Setting, seats: Sequence[int], loads: tuple[Load, ...], again: Floats
    ) -> DeviceOrder:
        """The pipeline on these seats."""
        return cls(
            tuple(seats),
            tuple(setting.seats[seat] for seat in seats),
            setting.placement,
            tuple(tuple(setting.links[a][b] for b in seats) for a in seats),
            loads,
            again,
            setting.splits_backward,
        )

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.placement)

    @cached_property
    def shared(self) -> bool:
        """Whether some device has several stages."""
        return len(set(self.placement)) < len(self.placement)

    @cached_property
    def alike(self) -> bool:
        """Whether what a stage receives takes as long from all stages before it."""
        return self._uniform or all(
            self.between(before, stage) == self.paces[stage].receives
            for stage in range(1, self.stages)
            for before in range(stage)
        )

    def between(self, before: int, after: int) -> Link:
        """The link between the devices of two stages."""
        one, other = self.placement[before], self.placement[after]
        return NO_LINK if one == other else self.links[one][other]

    @cached_property
    def _uniform(self) -> bool:
        """Whether all stages have devices of their own, and all links are the same object."""
        if self.shared or len(self.links) < 2:
            return False
        first = self.links[0][1]
        return all(
            link is first or link == first
            for a, row in enumerate(self.links)
            for b, link in enumerate(row)
            if a != b
        )

    @cached_property
    def paces(self) -> tuple[StageRates, ...]:
        """Of every stage."""
        found: list[StageRates] = []
        known: dict[StageRates, StageRates] = {}
        for stage, device in enumerate(self.placement):
            seat = self.devices[device]
            if self._uniform:
                near = self.links[0][1]
                receives, sends = near, near
            else:
                receives = fastest([self.between(s, stage) for s in range(stage)])
                sends = fastest([self.between(stage, s) for s in range(stage + 1, self.stages)])
            pace = StageRates(
                seat.kind, receives, sends, seat.update_s_per_byte, seat.update_latency_s
            )
            found.append(known.setdefault(pace, pace))
        return tuple(found)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, StageRates], ...]:
        """First stage, last stage and one, and pace of all runs of stages of equal pace."""
        found: list[tuple[int, int, StageRates]] = []
        for stage, pace in enumerate(self.paces):
            if found and found[-1][2] == pace:
                found[-1] = (found[-1][0], stage + 1, found[-1][2])
            else:
                found.append((stage, stage + 1, pace))
        return tuple(found)

    @cached_property
    def limited(self) -> bool:
        """Whether memory matters."""
        return any(math.isfinite(seat.memory) for seat in self.devices)

    @cached_property
    def memory(self) -> Floats:
        """Bytes of every device."""
        return np.array([float(seat.memory) for seat in self.devices])

    @cached_property
    def moments(self) -> Floats:
        """Shape (stages, moments, 2): `Load.counts` of every stage alone, filled up with 0."""
        counts = [
            self.loads[device].of(stage).counts[:, 0] for stage, device in enumerate(self.placement)
        ]
        moments = np.zeros((self.stages, max(map(len, counts)), 2))
        for stage, rows in enumerate(counts):
            moments[stage, : len(rows)] = rows
        return moments

    def excess(self, first: int, count: int, held: Floats) -> Floats:
        """By how many bytes stages alone are too large for their devices; below 0 if they fit.

        Args:
            first, count: which stages.
            held: shape (3, n): for good, of a micro-batch as input, and as saved.

        Returns:
            shape (count, n).
        """
        moments = self.moments[first : first + count]
        peak = (moments @ held[1:]).max(axis=1)
        limits = self.memory[list(self.placement[first : first + count])]
        peak += held[0]
        peak -= limits[:, None]
        return np.asarray(peak)

    def roomier(self, excess: float) -> DeviceOrder:
        """The same with so many bytes more on every device."""
        if not excess:
            return self
        return replace(
            self,
            devices=tuple(replace(seat, memory=seat.memory + excess) for seat in self.devices),
        )


def fastest(links: Sequence[Link]) -> Link:
    """A link that none of these betters."""
    if not links:
        return NO_LINK
    return Link(max(link.bandwidth for link in links), min(link.latency_s for link in links))


def ideal(setting: Setting, loads: tuple[Load, ...], again: Floats) -> DeviceOrder:
    """The best there is in every place: a lower bound of every order of devices.

    Its kind is -1, for the fastest of all kinds.
    """
    seats = setting.seats
    count = max(setting.placement) + 1
    best = Seat(
        -1,
        max(seat.memory for seat in seats),
        0,
        min(seat.update_s_per_byte for seat in seats),
        min(seat.update_latency_s for seat in seats),
    )
    links = {link for a, row in enumerate(setting.links) for b, link in enumerate(row) if a != b}
    link = fastest(list(links))
    rows = tuple(tuple(NO_LINK if a == b else link for b in range(count)) for a in range(count))
    devices = (best,) * count
    return DeviceOrder((), devices, setting.placement, rows, loads, again, setting.splits_backward)
