"""The report of a plan: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from gpipe_compiler.errors import UsageError
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import CATEGORIES, Category, DeviceMemory, MemoryPoint
from gpipe_compiler.plan.plan import timeline
from gpipe_compiler.report.activations import HEIGHT, WIDTH, activations
from gpipe_compiler.report.comparisons import row, verdict, way_rows
from gpipe_compiler.report.facts import (
    device_bytes,
    headline,
    parameter_count,
    render,
)
from gpipe_compiler.report.gantt import Gantt, gantt
from gpipe_compiler.report.picture import draw, pipeline_drawing
from gpipe_compiler.report.text import (
    ValidationResult,
    boundary_rows,
    constraint_rows,
    prediction_rows,
    stage_rows,
)
from gpipe_compiler.runtime.schedule.actions import split_stages

_MOST_DRAWN = 60
"""Boundary values up to which the picture of the pipeline is one that can be read."""

_MOST_ACTIONS = 10_000
"""Actions of a step up to which it is drawn."""

CURVE_WIDTH, CURVE_HEIGHT = 320.0, 44.0
"""Pixels of a curve."""

_MOST_CURVES = 32
"""Devices up to which all curves are drawn; of more, those of the fullest."""


def write_report(plan: Plan, path: Path, validation: ValidationResult | None = None) -> Path:
    """Writes the report; returns its path.

    Args:
        validation: None where nothing was compared (yet).
    """
    path.write_text(format_report(plan, validation), encoding="utf-8")
    return path


def format_report(plan: Plan, validation: ValidationResult | None = None) -> str:
    frontier = plan.frontier
    return render(
        "report.html.jinja",
        plan=plan,
        headline=headline(plan).plain,
        ways=way_rows(plan) if plan.whole else [],
        verdict=verdict(plan),
        parameters=parameter_count(plan),
        facts=[*constraint_rows(plan), *prediction_rows(plan)],
        gantt=_gantt(plan),
        settings=[] if frontier is None else [row(point, frontier) for point in frontier.points],
        split=bool(split_stages(plan.orders)),
        updates=any(stage.update_s > 0 for stage in plan.stages),
        stages=stage_rows(plan),
        memory=memory_rows(plan),
        categories=categories(plan),
        curve=(CURVE_WIDTH, CURVE_HEIGHT),
        activations=activations(plan),
        activations_size=(WIDTH, HEIGHT),
        boundaries=boundary_rows(plan),
        picture=_picture(plan),
        validation=validation,
    )


def _gantt(plan: Plan) -> Gantt | None:
    """The diagram of a step; None where it would have too many bars for a browser."""
    if sum(map(len, plan.orders)) > _MOST_ACTIONS:
        return None
    return gantt(timeline(plan))


def _picture(plan: Plan) -> Markup | None:
    """The pipeline as inline SVG; None where it would be too large, or cannot be laid out."""
    if len(plan.crossings) > _MOST_DRAWN:
        return None
    try:
        return Markup(draw(pipeline_drawing(plan)))  # our own template, itself escaped
    except UsageError:  # the layout library is an optional extra
        return None


@dataclass(frozen=True, slots=True)
class BarPiece:
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
    """

    device: int
    stages: str
    peak: int
    memory: int
    action: str
    parts: tuple[BarPiece, ...]
    curve: str
    limit: float | None
    tip: str

    @property
    def share(self) -> float:
        return self.peak / self.memory


def memory_rows(plan: Plan) -> tuple[MemoryRow, ...]:
    peaks = device_bytes(plan)
    places = plan.placement or tuple(range(len(plan.stages)))
    largest = max(peaks, default=0)
    drawn = sorted(range(len(peaks)), key=lambda device: -peaks[device])[:_MOST_CURVES]
    rows = []
    for device, (peak, machine) in enumerate(zip(peaks, plan.devices, strict=True)):
        held = plan.prediction.memory[device] if plan.prediction.memory else None
        stages = [index for index, place in enumerate(places) if place == device]
        points = held.points if held is not None and device in drawn else ()
        top = max((point.peak for point in points), default=0)
        known = machine.memory <= 1.5 * top
        scale = max(top, machine.memory if known else 0)
        rows.append(
            MemoryRow(
                device=device,
                stages=", ".join(map(str, stages)),
                peak=peak,
                memory=machine.memory,
                action=held.action if held is not None else "",
                parts=_parts(plan, stages, peak, held, largest),
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
    plan: Plan, stages: Sequence[int], peak: int, held: DeviceMemory | None, largest: int
) -> tuple[BarPiece, ...]:
    if held is not None:
        sizes = [(c.value, c.value, held.of(c)) for c in CATEGORIES]
    else:
        state = min(peak, sum(plan.stages[stage].state_bytes for stage in stages))
        (one, other), amounts = categories(plan), (state, peak - state)
        sizes = [(*one, amounts[0]), (*other, amounts[1])]
    return tuple(
        BarPiece(name, style, size, 100 * size / max(largest, 1))
        for name, style, size in sizes
        if size
    )


def _curve(points: Sequence[MemoryPoint], scale: float) -> str:
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
