"""Which devices a pipeline may run on, and in which order: those orders that differ."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from gpipe_compiler.passes.cut.setting import Setting

MOST_ORDERS = 400
"""Orders of devices that are tried at most; of more, the first ones."""

MOST_SEATS = 24
"""Devices whose orders are tried at most; of more, they stay as they are."""


def seat_orders(setting: Setting) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """For every order that may differ from the others, the seat of every device of the pipeline.

    The devices of a host stay together. Orders of seats that are alike in kind, memory, updates
    and links are given once.

    Returns:
        the orders, and whether these are all of them.
    """
    return _Seating(setting).orders()


class _Seating:
    def __init__(self, setting: Setting) -> None:
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
            for s in setting.seats
        ]

    def orders(self) -> tuple[tuple[tuple[int, ...], ...], bool]:
        natural = tuple(range(self.devices))
        if self.setting.seated or self._all_alike():
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
        """Whether all orders are alike: equal seats, and equal links or equal, full hosts."""
        hosts = [seat.host for seat in self.setting.seats]
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
        return tuple(self.own[seat] for seat in order), links

    def _extended(self, chosen: tuple[int, ...], left: list[int]) -> Iterator[tuple[int, ...]]:
        """All orders that begin with the chosen seats."""
        if len(chosen) == self.devices:
            yield chosen
            return
        seats = self.setting.seats
        here = seats[chosen[-1]].host if chosen else None
        used = {seats[seat].host for seat in chosen}
        tried: list[int] = []
        for seat in left:
            if seats[seat].host != here and seats[seat].host in used:
                continue
            if any(self._exchangeable(seat, other, chosen) for other in tried):
                continue
            tried.append(seat)
            yield from self._extended((*chosen, seat), [s for s in left if s != seat])

    def _exchangeable(self, one: int, other: int, chosen: Sequence[int]) -> bool:
        """Whether two seats, or their hosts, can change places and nothing else changes."""
        seats = self.setting.seats
        if self.own[one] != self.own[other]:
            return False
        if seats[one].host == seats[other].host:
            return self._symmetric({one: other, other: one})
        mine = [s for s in range(len(seats)) if seats[s].host == seats[one].host]
        theirs = [s for s in range(len(seats)) if seats[s].host == seats[other].host]
        if len(mine) != len(theirs) or {*mine, *theirs} & set(chosen):
            return False
        mine.sort(key=lambda s: (s != one, self.own[s]))
        theirs.sort(key=lambda s: (s != other, self.own[s]))
        pairs = list(zip(mine, theirs, strict=True))
        return self._symmetric(dict(pairs) | {b: a for a, b in pairs})

    def _symmetric(self, swap: dict[int, int]) -> bool:
        """Whether renaming seats so leaves all of them as they are."""
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
