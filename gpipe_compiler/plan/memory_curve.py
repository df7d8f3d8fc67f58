"""The memory of a device: how much at each action, of what, and what holds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, overload

from gpipe_compiler.plan.fields import from_fields, own_fields

MOST_POINTS = 160
"""Points of a curve that stand in a plan."""

MOST_HOLDERS = 40
"""Holders of a device's peak that stand in a plan one by one; smaller ones are added up."""


class Category(Enum):
    """What memory is for. Every storage counts in one."""

    WEIGHTS = "weights"
    """Parameters, buffers and constants, with the copies that autocast casts of them,
    and that micro-batches begin with, of what a mini-batch changes once."""
    GRADIENTS = "gradients"
    """Of parameters."""
    OPTIMIZER = "optimizer"
    """What the optimizer remembers, and what it takes for a moment while it steps."""
    ACTIVATIONS = "activations"
    """What autograd keeps from a forward to its backward."""
    BOUNDARY = "boundary"
    """The batch, boundary values and their gradients: received, handed on, or under way."""
    TEMPORARIES = "temporaries"
    """What is made and freed within one action."""
    COMMUNICATION = "communication"
    """Gradients in rows, on their way between replicas, and sums of shared ones."""
    WORKSPACES = "workspaces"
    """Of the matrix library of a GPU, which PyTorch takes once and keeps."""


CATEGORIES = tuple(Category)

Sizes = tuple[int, ...]
"""Bytes of each category, in their order."""

NOTHING: Sizes = (0,) * len(CATEGORIES)


@dataclass(frozen=True, slots=True)
class PeakHolder:
    """Something that is in memory at the peak.

    Attributes:
        what: in words: `8x64x56x56 float32`, or `weights`.
        op: the op of the graph that made it, in whose backward it was made, or that reads it: the
            first one, of layers that repeat. "" if none is known.
        count: how many there are, of one stage: of several micro-batches, say.
        stage: whose it is; -1 for what is the device's.
        modules: in how many modules they are made, whose paths differ in numbers only.
    """

    what: str
    category: Category
    op: str
    bytes: int
    count: int
    stage: int
    modules: int = 1


class MemoryPoint(NamedTuple):
    """One action of a device.

    Attributes:
        action: as the schedule prints it (`2F0`); `update` for the optimizer's step.
        peak, after: bytes in memory at most while it runs, and when it has.
    """

    action: str
    peak: int
    after: int


@dataclass(frozen=True)
class Curve(Sequence[MemoryPoint]):
    """The points of all actions of a device, which may be many: each is made when asked for.

    Attributes:
        actions: that print as a point has them.
    """

    actions: Sequence[object]
    peaks: Sequence[int]
    afters: Sequence[int]

    @overload
    def __getitem__(self, place: int) -> MemoryPoint: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[MemoryPoint, ...]: ...

    def __getitem__(self, place: int | slice) -> MemoryPoint | tuple[MemoryPoint, ...]:
        if isinstance(place, slice):
            return tuple(self[index] for index in range(*place.indices(len(self))))
        return MemoryPoint(str(self.actions[place]), self.peaks[place], self.afters[place])

    def __len__(self) -> int:
        return len(self.peaks)

    def above(self, fixed: int, *further: MemoryPoint) -> Curve:
        """The same with these bytes more everywhere, and with further points."""
        return Curve(
            [*self.actions, *(point.action for point in further)],
            [*(peak + fixed for peak in self.peaks), *(point.peak for point in further)],
            [*(after + fixed for after in self.afters), *(point.after for point in further)],
        )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device over a training step, the optimizer's included.

    Of a step in which the optimizer remembers something already. Bytes are those of storages;
    what an allocator rounds up, and what a kernel takes within itself, is not in them, but for
    the workspaces of matrix libraries.

    Attributes:
        sizes: the bytes of each category at that moment.
        points: every action, in order; in a plan shortened to `MOST_POINTS`.
        holders: all that is in memory at the peak, the largest first, where it was looked for; in
            a plan shortened to `MOST_HOLDERS`, and what each category has besides.
        stage_peaks: for each of them, what is of it at its own peak.
        reserved: what PyTorch's caching allocator takes from a GPU for all this, at most; 0 where
            that is not known, as on a processor.
    """

    peak: int
    action: str
    sizes: Sizes
    points: Sequence[MemoryPoint] = ()
    holders: tuple[PeakHolder, ...] = ()
    stages: tuple[int, ...] = ()
    stage_peaks: tuple[int, ...] = ()
    reserved: int = 0

    def of(self, category: Category) -> int:
        """Bytes of a category at the peak."""
        return self.sizes[CATEGORIES.index(category)]

    def shortened(self, points: int = MOST_POINTS, holders: int = MOST_HOLDERS) -> DeviceMemory:
        """With fewer points, each the highest of those it stands for, and with fewer holders, the
        smaller ones of a category as one."""
        return dataclasses.replace(
            self,
            points=_shortened(self.points, points),
            holders=(*self.holders[:holders], *_added_up(self.holders[holders:])),
        )

    def to_fields(self) -> dict[str, Any]:
        sizes = {c.value: size for c, size in zip(CATEGORIES, self.sizes, strict=True)}
        return own_fields(self) | {"sizes": sizes}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], where: str = "") -> DeviceMemory:
        sizes = [fields["sizes"].get(category.value, 0) for category in CATEGORIES]
        return from_fields(cls, {**fields, "sizes": sizes}, where)


def _added_up(holders: Sequence[PeakHolder]) -> Iterator[PeakHolder]:
    """One holder for all of a category."""
    for category in CATEGORIES:
        own = [holder for holder in holders if holder.category is category]
        if own:
            size, count = sum(h.bytes for h in own), sum(h.count for h in own)
            yield PeakHolder("smaller ones", category, "", size, count, -1)


def _shortened(points: Sequence[MemoryPoint], most: int) -> tuple[MemoryPoint, ...]:
    if len(points) <= most:
        return tuple(points)
    ends = [len(points) * index // most for index in range(most + 1)]
    peaks = points.peaks if isinstance(points, Curve) else [point.peak for point in points]
    return tuple(
        points[max(range(start, end), key=peaks.__getitem__)]
        for start, end in itertools.pairwise(ends)
    )
