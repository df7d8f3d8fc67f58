"""The devices of a pipeline in one order, as the stages see them; and all orders that differ."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpipe_compiler.cluster import NO_LINK, Link
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.simulate.in_flight import Load

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageRates:
    """What the seconds of a stage follow from, beside the nodes in it.

    Attributes:
        kind: of its device.
        receives: the fastest link from any stage before it, `sends` that to any stage after it.
        update_s_per_byte, update_latency_s: as in `DeviceSlot`.
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
        slots: which slot of the setting each device of the pipeline is; empty for the best of all
            in every place, which no order is slower or smaller than.
        devices: the same slots themselves.
        loads: of every device; empty where memory does not matter.
        again: for every stage, 1 where its times count with computing again, else 0.
        split: whether the weights' part of a backward comes later.
    """

    slots: tuple[int, ...]
    devices: tuple[DeviceSlot, ...]
    placement: tuple[int, ...]
    links: tuple[tuple[Link, ...], ...]
    loads: tuple[Load, ...]
    again: Floats
    split: bool

    @classmethod
    def of(
        cls, setting: CutSetting, slots: Sequence[int], loads: tuple[Load, ...], again: Floats
    ) -> DeviceOrder:
        """The pipeline on these slots."""
        return cls(
            tuple(slots),
            tuple(setting.slots[slot] for slot in slots),
            setting.placement,
            tuple(tuple(setting.links[a][b] for b in slots) for a in slots),
            loads,
            again,
            setting.splits_backward,
        )

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def shared(self) -> bool:
        """Whether some device has several stages."""
        return len(set(self.placement)) < len(self.placement)

    @cached_property
    def alike(self) -> bool:
        """Whether what a stage receives takes as long from all stages before it."""
        return self._uniform or all(
            self.between(before, stage) == self.rates[stage].receives
            for stage in range(1, self.stages)
            for before in range(stage)
        )

    def between(self, before: int, after: int) -> Link:
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
    def rates(self) -> tuple[StageRates, ...]:
        """Of every stage."""
        found: list[StageRates] = []
        known: dict[StageRates, StageRates] = {}
        for stage, device in enumerate(self.placement):
            slot = self.devices[device]
            if self._uniform:
                near = self.links[0][1]
                receives, sends = near, near
            else:
                receives = fastest([self.between(s, stage) for s in range(stage)])
                sends = fastest([self.between(stage, s) for s in range(stage + 1, self.stages)])
            rate = StageRates(
                slot.kind, receives, sends, slot.update_s_per_byte, slot.update_latency_s
            )
            found.append(known.setdefault(rate, rate))
        return tuple(found)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, StageRates], ...]:
        """First stage, last stage and one, and rate of all runs of stages of equal rate."""
        found: list[tuple[int, int, StageRates]] = []
        for stage, rate in enumerate(self.rates):
            if found and found[-1][2] == rate:
                found[-1] = (found[-1][0], stage + 1, found[-1][2])
            else:
                found.append((stage, stage + 1, rate))
        return tuple(found)

    @cached_property
    def limited(self) -> bool:
        """Whether memory matters."""
        return any(math.isfinite(slot.memory) for slot in self.devices)

    @cached_property
    def memory(self) -> Floats:
        """Bytes of every device."""
        return np.array([float(slot.memory) for slot in self.devices])

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
        if not excess:
            return self
        return replace(
            self, devices=tuple(replace(slot, memory=slot.memory + excess) for slot in self.devices)
        )


def fastest(links: Sequence[Link]) -> Link:
    """A link at least as good as all of these."""
    if not links:
        return NO_LINK
    return Link(max(link.bandwidth for link in links), min(link.latency_s for link in links))


def ideal(setting: CutSetting, loads: tuple[Load, ...], again: Floats) -> DeviceOrder:
    """The best there is in every place: a lower bound of every order of devices.

    Its kind is -1, for the fastest of all kinds.
    """
    slots = setting.slots
    count = max(setting.placement) + 1
    best = DeviceSlot(
        -1,
        max(slot.memory for slot in slots),
        0,
        min(slot.update_s_per_byte for slot in slots),
        min(slot.update_latency_s for slot in slots),
    )
    links = {link for a, row in enumerate(setting.links) for b, link in enumerate(row) if a != b}
    link = fastest(list(links))
    rows = tuple(tuple(NO_LINK if a == b else link for b in range(count)) for a in range(count))
    devices = (best,) * count
    return DeviceOrder((), devices, setting.placement, rows, loads, again, setting.splits_backward)


MOST_ORDERS = 400
"""Orders of devices that are tried at most; of more, the first ones."""

MOST_SEATS = 24
"""Devices whose orders are tried at most; of more, they stay as they are."""


def slot_orders(setting: CutSetting) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """For every order that may differ from the others, the slot of every device of the pipeline.

    The devices of a host stay together. Orders of slots that are alike in kind, memory, updates
    and links are given once.

    Returns:
        the orders, and whether these are all of them.
    """
    return _Seating(setting).orders()


class _Seating:
    def __init__(self, setting: CutSetting) -> None:
        self.setting = setting
        self.devices = max(setting.placement) + 1
        numbers: dict[Hashable, int] = {}
        self.links = [
            [numbers.setdefault(link, len(numbers)) for link in row] for row in setting.links
        ]
        self.own = [
            numbers.setdefault(
                (s.kind, s.memory, s.update_s_per_byte, s.update_latency_s), len(numbers)
            )
            for s in setting.slots
        ]

    def orders(self) -> tuple[tuple[tuple[int, ...], ...], bool]:
        natural = tuple(range(self.devices))
        if self.setting.slots_in_order or self._all_alike():
            return (natural,), True
        if len(self.own) > MOST_SEATS:
            return (natural, natural[::-1]), False
        found: dict[Hashable, tuple[int, ...]] = {}
        for order in self._extended((), list(range(len(self.own)))):
            if len(found) >= MOST_ORDERS:
                return tuple(found.values()), False
            found.setdefault(self._signature(order), order)
        return tuple(found.values()), True

    def _all_alike(self) -> bool:
        """Whether all orders are alike: equal slots, and equal links or equal, full hosts."""
        hosts = [slot.host for slot in self.setting.slots]
        near = {link for a, b, link in self._pairs() if hosts[a] == hosts[b]}
        far = {link for a, b, link in self._pairs() if hosts[a] != hosts[b]}
        if len(set(self.own)) > 1 or max(len(near), len(far)) > 1:
            return False
        sizes = {hosts.count(host) for host in hosts}
        return len(near | far) <= 1 or (len(sizes) == 1 and self.devices == len(hosts))

    def _pairs(self) -> Iterator[tuple[int, int, int]]:
        for a, row in enumerate(self.links):
            for b, link in enumerate(row):
                if a != b:
                    yield a, b, link

    def _signature(self, order: Sequence[int]) -> Hashable:
        links = tuple(self.links[a][b] for a in order for b in order if a != b)
        return tuple(self.own[slot] for slot in order), links

    def _extended(self, chosen: tuple[int, ...], left: list[int]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == self.devices:
            yield chosen
            return
        slots = self.setting.slots
        here = slots[chosen[-1]].host if chosen else None
        used = {slots[slot].host for slot in chosen}
        tried: list[int] = []
        for slot in left:
            if slots[slot].host != here and slots[slot].host in used:
                continue
            if any(self._exchangeable(slot, other, chosen) for other in tried):
                continue
            tried.append(slot)
            yield from self._extended((*chosen, slot), [s for s in left if s != slot])

    def _exchangeable(self, one: int, other: int, chosen: Sequence[int]) -> bool:
        """Whether two slots, or their hosts, can change places and nothing else changes."""
        slots = self.setting.slots
        if self.own[one] != self.own[other]:
            return False
        if slots[one].host == slots[other].host:
            return self._symmetric({one: other, other: one})
        mine = [s for s in range(len(slots)) if slots[s].host == slots[one].host]
        theirs = [s for s in range(len(slots)) if slots[s].host == slots[other].host]
        if len(mine) != len(theirs) or {*mine, *theirs} & set(chosen):
            return False
        mine.sort(key=lambda s: (s != one, self.own[s]))
        theirs.sort(key=lambda s: (s != other, self.own[s]))
        pairs = list(zip(mine, theirs, strict=True))
        return self._symmetric(dict(pairs) | {b: a for a, b in pairs})

    def _symmetric(self, swap: dict[int, int]) -> bool:
        """Whether renaming slots so leaves all of them as they are."""
        size = len(self.own)
        if any(self.own[a] != self.own[b] for a, b in swap.items()):
            return False
        return all(
            self.links[a][b] == self.links[swap.get(a, a)][swap.get(b, b)]
            for a in swap
            for b in range(size)
            if a != b
        ) and all(
            self.links[b][a] == self.links[swap.get(b, b)][swap.get(a, a)]
            for a in swap
            for b in range(size)
            if a != b
        )
