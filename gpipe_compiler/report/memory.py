"""The memory of every device as bars and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import CATEGORIES, Category, DeviceMemory, Point
from gpipe_compiler.report.facts import device_bytes

CURVE_WIDTH, CURVE_HEIGHT = 320.0, 44.0
"""Pixels of a curve."""

_MOST_CURVES = 32
"""Devices up to which all curves are drawn; of more, those of the fullest."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: its style, its bytes, and its width as percents of the longest bar."""

    name: str
    style: str
    bytes: int
    width: float


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a device.

    Attributes:
        stages: that it runs, as `0, 2`.
        memory: bytes that it has.
        action: during which the peak is; "" where that is not known.
        curve: a path of SVG under which lies what is in memory, action by action; "" for none.
        limit: the height in the picture of the device's memory, where it is in it.
        tip: of the curve.
    """

    device: int
    stages: str
    peak: int
    memory: int
    action: str
    parts: tuple[Part, ...]
    curve: str
    limit: float | None
    tip: str

    @property
    def share(self) -> float:
        """The peak as a share of the device's memory."""
        return self.peak / self.memory


def memory_rows(plan: Plan) -> tuple[MemoryRow, ...]:
    """A row for every device, by rank."""
    peaks = device_bytes(plan)
    places = plan.placement or tuple(range(len(plan.stages)))
    largest = max(peaks, default=0)
    drawn = sorted(range(len(peaks)), key=lambda device: -peaks[device])[:_MOST_CURVES]
    rows = []
    for device, (peak, machine) in enumerate(zip(peaks, plan.devices, strict=True)):
        told = plan.prediction.memory[device] if plan.prediction.memory else None
        stages = [index for index, place in enumerate(places) if place == device]
        points = told.points if told is not None and device in drawn else ()
        top = max((point.peak for point in points), default=0)
        known = machine.memory <= 1.5 * top
        scale = max(top, machine.memory if known else 0)
        rows.append(
            MemoryRow(
                device=device,
                stages=", ".join(map(str, stages)),
                peak=peak,
                memory=machine.memory,
                action=told.action if told is not None else "",
                parts=_parts(plan, stages, peak, told, largest),
                curve=_curve(points, scale),
                limit=CURVE_HEIGHT * (1 - machine.memory / scale) if known and scale else None,
                tip=" ".join(point.action for point in points[:40]),
            )
        )
    return tuple(rows)


def categories(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The names of what the bars are made of, with their styles."""
    if plan.prediction.memory:
        found = {
            category
            for device in plan.prediction.memory
            for category in CATEGORIES
            if device.of(category)
        }
        return tuple((c.value, c.value) for c in CATEGORIES if c in found)
    state = "weights and what trains them" if plan.training else "weights"
    return ((state, Category.WEIGHTS.value), ("activations", Category.ACTIVATIONS.value))


def _parts(
    plan: Plan, stages: Sequence[int], peak: int, told: DeviceMemory | None, largest: int
) -> tuple[Part, ...]:
    if told is not None:
        sizes = [(c.value, c.value, told.of(c)) for c in CATEGORIES]
    else:
        state = min(peak, sum(plan.stages[stage].state_bytes for stage in stages))
        (one, other), amounts = categories(plan), (state, peak - state)
        sizes = [(*one, amounts[0]), (*other, amounts[1])]
    return tuple(
        Part(name, style, size, 100 * size / max(largest, 1)) for name, style, size in sizes if size
    )


def _curve(points: Sequence[Point], scale: float) -> str:
    """A step for every action: what it takes at most, then what it leaves."""
    if not points or not scale:
        return ""
    width = CURVE_WIDTH / len(points)
    commands = [f"M 0 {CURVE_HEIGHT:g}"]
    for index, point in enumerate(points):
        left, middle, right = index * width, (index + 0.6) * width, (index + 1) * width
        peak, after = (CURVE_HEIGHT * (1 - size / scale) for size in (point.peak, point.after))
        commands.append(f"L {left:.1f} {peak:.1f} L {middle:.1f} {peak:.1f}")
        commands.append(f"L {middle:.1f} {after:.1f} L {right:.1f} {after:.1f}")
    return " ".join([*commands, f"L {CURVE_WIDTH:g} {CURVE_HEIGHT:g} Z"])
