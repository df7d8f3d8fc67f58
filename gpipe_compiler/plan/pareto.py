"""Settings of a pipeline that were compared: throughput against the memory of the fullest device.

A frontier is data: it travels with the plan that was chosen from it, and goes to JSON and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpipe_compiler.options import RematChoice
from gpipe_compiler.plan.fields import from_fields, own_fields
from gpipe_compiler.runtime.spec import ScheduleKind

EQUAL = 1e-3
"""Steps that differ by a smaller share count as equally long where one is chosen: less than any
prediction is worth."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a pipeline may be chosen by.

    Attributes:
        devices: that one replica of the pipeline has.
        schedule: in training; inference has one schedule only, and says GPIPE here.
    """

    stages: int
    devices: int
    schedule: ScheduleKind
    microbatches: int
    remat: RematChoice = RematChoice.NONE

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Ascending from what is simplest; what decides between plans that are equally good."""
        return (
            self.devices,
            self.stages,
            list(ScheduleKind).index(self.schedule),
            list(RematChoice).index(self.remat),
            self.microbatches,
        )


class SearchStatus(Enum):
    """What became of a choice.

    PLANNED: its figures are those of its plan. SLOWER: not planned, as another one that fits is
    faster than its bound, and needs no more memory than it does at least. LARGER: not planned, as
    what it needs at least is more than any device has. REFUSED: it cannot be planned. NOT_REACHED:
    time was up.
    """

    PLANNED = "planned"
    SLOWER = "slower"
    LARGER = "larger"
    REFUSED = "refused"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A choice, and what is known of it.

    Attributes:
        step_s: simulated seconds of a step; a lower bound unless it was planned.
        peak_bytes: of the fullest device, by the quick model, which all points are compared by
            (exactly, where that changed what became of it); a lower bound unless it was planned.
        exact_bytes: of the fullest device, played exactly; 0 where it was not.
        over_bytes: by how much some device has too little memory; a lower bound likewise.
        bubble, recompute: shares of device time spent waiting, and running forwards again.
        problem: why it was refused.
        undominated: among the plans that fit, no other one is as fast and as small, and better
            in one of both; and of equal ones this is the simplest.
    """

    choice: Choice
    status: SearchStatus
    step_s: float = 0.0
    peak_bytes: int = 0
    over_bytes: int = 0
    bubble: float = 0.0
    recompute: float = 0.0
    problem: str = ""
    undominated: bool = False
    exact_bytes: int = 0

    @property
    def told_bytes(self) -> int:
        """The peak, as exactly as it is known."""
        return self.exact_bytes or self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether it was planned, and its plan fits every device."""
        return self.status is SearchStatus.PLANNED and not self.over_bytes

    def beats(self, other: ParetoPoint) -> bool:
        """Whether it is as fast and as small, and better in one of both, or else simpler."""
        if self.step_s > other.step_s or self.peak_bytes > other.peak_bytes:
            return False
        equal = (self.step_s, self.peak_bytes) == (other.step_s, other.peak_bytes)
        return not equal or self.choice.simplicity < other.choice.simplicity

    def to_fields(self) -> dict[str, Any]:
        fields = own_fields(self.choice) | own_fields(self)
        del fields["choice"]
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], where: str = "") -> ParetoPoint:
        chosen = {field.name for field in dataclasses.fields(Choice)}
        choice = {name: value for name, value in fields.items() if name in chosen}
        rest = {name: value for name, value in fields.items() if name not in chosen}
        return from_fields(cls, rest | {"choice": choice}, where)


@dataclass(frozen=True, slots=True)
class Frontier:
    """All choices that were looked at.

    Attributes:
        points: best first: those that fit by their step, then those that do not by how far they
            are from it, then those that were not planned. The first one is chosen, if it fits.
        omitted: points that were left out here.
    """

    points: tuple[ParetoPoint, ...]
    batch_size: int
    omitted: int = 0

    @classmethod
    def of(cls, points: Iterable[ParetoPoint], batch_size: int) -> Frontier:
        """The points sorted, those marked that no other dominates."""
        found = list(points)
        fitting = [point for point in found if point.fits]
        marked = [
            dataclasses.replace(
                point, undominated=point.fits and not any(other.beats(point) for other in fitting)
            )
            for point in found
        ]
        ordered = sorted(marked, key=_rank)
        if ordered and ordered[0].fits:
            chosen = min(ordered, key=lambda point: _merit(point, ordered[0].step_s))
            ordered.remove(chosen)
            ordered.insert(0, chosen)
        return cls(tuple(ordered), batch_size)

    @property
    def chosen(self) -> ParetoPoint | None:
        """The fastest that fits; of equally fast ones the smallest. None where nothing fits."""
        return self.points[0] if self.points and self.points[0].fits else None

    def samples_per_s(self, point: ParetoPoint) -> float:
        return self.batch_size / point.step_s if point.step_s > 0 else 0.0

    def shortened(self, most: int) -> Frontier:
        """The same with at most this many points, beside those that are not dominated."""
        kept = [p for i, p in enumerate(self.points) if i < most or p.undominated]
        omitted = self.omitted + len(self.points) - len(kept)
        return dataclasses.replace(self, points=tuple(kept), omitted=omitted)


def _rank(point: ParetoPoint) -> tuple[object, ...]:
    if point.fits:
        return 0, point.step_s, point.peak_bytes, point.choice.simplicity
    if point.status is SearchStatus.PLANNED:
        return 1, point.over_bytes, point.step_s, point.choice.simplicity
    order = list(SearchStatus).index(point.status)
    return 1 + order, point.step_s, point.over_bytes, point.choice.simplicity


def _merit(point: ParetoPoint, best_s: float) -> tuple[object, ...]:
    """What decides on the choice among those that fit; `best_s` is the shortest step."""
    near = point.fits and point.step_s <= best_s * (1 + EQUAL)
    return not near, point.peak_bytes, point.step_s, point.choice.simplicity
