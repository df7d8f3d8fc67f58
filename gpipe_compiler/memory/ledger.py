"""Who holds which storage of a device, and what all of them come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpipe_compiler.memory.curve import CATEGORIES, NOTHING, Category, Sizes


@dataclass(slots=True)
class Held:
    """A storage that several may hold.

    Attributes:
        holders: how many do.
        name: for people: the value that lies in it.
        stage: that made it; -1 for what came from elsewhere.
        number: to tell it by.
    """

    bytes: int
    category: Category
    name: str
    stage: int
    number: int
    holders: int = 1


@dataclass(frozen=True, slots=True)
class Own:
    """A storage that a stage alone holds: a block of its tapes, of one micro-batch."""

    stage: int
    block: int


Told = Callable[[int, int, Held | Own], None]
"""Called with the number of a storage, its bytes where it comes to life and -1 where it ends, and
what it is."""


class Ledger:
    """The storages of a device that several may hold, and the sum of all of them.

    Args:
        stages: of the device.
        told: hears of every storage.
    """

    def __init__(self, stages: Iterable[int], told: Told | None = None) -> None:
        self.now: list[int] = list(NOTHING)
        self.total = 0
        self.of_stage = dict.fromkeys(stages, 0)
        self.alive: dict[int, Held] = {}
        self.told = told
        self._index = {item: number for number, item in enumerate(CATEGORIES)}
        self._count = 0

    @property
    def sizes(self) -> Sizes:
        """Bytes of each category."""
        return tuple(self.now)

    def number(self) -> int:
        """A number that no storage has had."""
        self._count += 1
        return self._count

    def take(
        self, size: int, category: Category, name: str, stage: int = -1, *, counted: bool = True
    ) -> Held:
        """A storage comes to life, with one holder.

        Args:
            counted: False where its bytes have been added already.
        """
        held = Held(size, category, name, stage, self.number())
        self.alive[held.number] = held
        if counted:
            self._add(held, size)
        return held

    def let_go(self, held: Held | None, *, counted: bool = True) -> None:
        """A holder lets go; the last one ends the storage.

        Args:
            counted: False where its bytes have been taken off already.
        """
        if held is None:
            return
        held.holders -= 1
        if held.holders == 0:
            del self.alive[held.number]
            if counted:
                self._add(held, -held.bytes)

    def add(self, sizes: Sizes, stage: int) -> None:
        """The sum changes by what an action of a stage has come to."""
        change = sum(sizes)
        for index, size in enumerate(sizes):
            self.now[index] += size
        self.total += change
        self.of_stage[stage] += change

    def _add(self, held: Held, change: int) -> None:
        self.now[self._index[held.category]] += change
        self.total += change
        if held.stage in self.of_stage:
            self.of_stage[held.stage] += change
        if self.told is not None:
            self.told(held.number, change if change >= 0 else -1, held)
