"""Reference counts of the shared storages of a device, and the sum of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpipe_compiler.plan.memory_curve import CATEGORIES, NOTHING, Category, Sizes


@dataclass(slots=True)
class SharedBuffer:
    """A storage with a reference count.

    Attributes:
        holders: its count.
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
    """A storage of one stage alone: a block of its traces, of one micro-batch."""

    stage: int
    block: int


PLACE = {category: place for place, category in enumerate(CATEGORIES)}
"""Where each category stands among them."""

Listener = Callable[[int, int, SharedBuffer | Own], None]
"""Called with the number of a storage, its bytes when it is allocated or -1 when it is freed, and
the storage."""


class RefCounts:
    """The reference-counted storages of a device, and the bytes of all.

    Args:
        stages: of the device.
        listener: called for every storage.
    """

    def __init__(self, stages: Iterable[int], listener: Listener | None = None) -> None:
        self.now: list[int] = list(NOTHING)
        self.total = 0
        self.of_stage = dict.fromkeys(stages, 0)
        self.listener = listener
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
        """Allocates a storage with one holder.

        Args:
            counted: False where its bytes have been added already.
        """
        held = SharedBuffer(size, category, name, stage, self.number())
        if counted:
            self._add(held, size)
        return held

    def release(self, held: SharedBuffer | None) -> None:
        """Drops one holder; the last one frees the storage."""
        if held is None:
            return
        held.holders -= 1
        if held.holders == 0:
            self._add(held, -held.bytes)

    def end_in(self, stage: int, held: SharedBuffer | None) -> None:
        """Drops the last holder within an action of a stage, whose delta has the bytes.

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
        """Adds the delta of an action of a stage.

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
        if self.listener is not None:
            self.listener(held.number, change if change >= 0 else -1, held)


def gradient_of(value: str) -> str:
    """What the gradient of a value is called."""
    return f"gradient of {value}"
