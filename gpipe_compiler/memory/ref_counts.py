"""Who holds which storage of a device, and what all of them come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpipe_compiler.plan.memory_curve import CATEGORIES, NOTHING, Category, Sizes


@dataclass(slots=True)
class SharedBuffer:
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


PLACE = {category: place for place, category in enumerate(CATEGORIES)}
"""Where each category stands among them."""

Told = Callable[[int, int, SharedBuffer | Own], None]
"""Called with the number of a storage, its bytes where it comes to life and -1 where it ends, and
what it is."""


class RefCounts:
    """The storages of a device that several may hold, and the sum of all of them.

    Args:
        stages: of the device.
        told: hears of every storage.
    """

    def __init__(self, stages: Iterable[int], told: Told | None = None) -> None:
        self.now: list[int] = list(NOTHING)
        self.total = 0
        self.of_stage = dict.fromkeys(stages, 0)
        self.told = told
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
    ) -> SharedBuffer:
        """A storage comes to life, with one holder.

        Args:
            counted: False where its bytes have been added already.
        """
        held = SharedBuffer(size, category, name, stage, self.number())
        if counted:
            self._add(held, size)
        return held

    def let_go(self, held: SharedBuffer | None) -> None:
        """A holder lets go; the last one ends the storage."""
        if held is None:
            return
        held.holders -= 1
        if held.holders == 0:
            self._add(held, -held.bytes)

    def end_in(self, stage: int, held: SharedBuffer | None) -> None:
        """The last holder lets go within an action of a stage, which has taken the bytes off.

        They were not the stage's own where another has made them.
        """
        if held is None:
            return
        held.holders -= 1
        if held.stage != stage:
            self.of_stage[stage] += held.bytes
            if held.stage in self.of_stage:
                self.of_stage[held.stage] -= held.bytes

    def add(self, changes: Iterable[tuple[int, int]], stage: int) -> None:
        """The sum changes by what an action of a stage has come to.

        Args:
            changes: numbers of categories, and by how many bytes each.
        """
        change = 0
        for index, size in changes:
            self.now[index] += size
            change += size
        self.total += change
        self.of_stage[stage] += change

    def _add(self, held: SharedBuffer, change: int) -> None:
        self.now[PLACE[held.category]] += change
        self.total += change
        if held.stage in self.of_stage:
            self.of_stage[held.stage] += change
        if self.told is not None:
            self.told(held.number, change if change >= 0 else -1, held)


def gradient_of(value: str) -> str:
    """What the gradient of a value is called."""
    return f"gradient of {value}"
