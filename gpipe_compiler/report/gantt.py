"""The simulated step as a diagram, and as a trace for Perfetto and chrome://tracing.

In the diagram devices go downwards, and time to the right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.plan import timeline
from gpipe_compiler.simulate.step import Lane, Simulation, Span
from gpipe_compiler.text.units import format_seconds

WIDTH = 960.0
LEFT = 68.0
ROW = 44.0
_TOP = 24.0
_HEIGHTS: Mapping[Lane, tuple[float, float]] = {
    Lane.RECEIVE: (4.0, 5.0),
    Lane.DEVICE: (10.0, 24.0),
    Lane.UPDATE: (10.0, 24.0),
    Lane.GRADIENT: (35.0, 5.0),
}
"""For every lane, its offset in the device's row and its height, in pixels."""
_WORK: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "again": "forward again",
    "weight": "gradients of the weights",
    "update": "update",
}
"""For every kind of bar on a device, its name in tooltips."""
_LETTER = 6.5
_TICKS = 8


@dataclass(frozen=True, slots=True)
class Bar:
    """One action: its rectangle in pixels, CSS class, label, and tooltip."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str
    tip: str


@dataclass(frozen=True)
class Gantt:
    """The diagram of one step; rows and ticks are labels with their y and x in pixels."""

    bars: tuple[Bar, ...]
    rows: tuple[tuple[str, float], ...]
    ticks: tuple[tuple[str, float], ...]
    width: float
    height: float


def gantt(simulation: Simulation) -> Gantt:
    devices = len(simulation.busy_s)
    scale = (WIDTH - LEFT) / simulation.step_s if simulation.step_s > 0 else 0.0
    several = len({span.action.stage for span in simulation.timeline}) > devices
    return Gantt(
        bars=tuple(_bar(span, scale, several) for span in simulation.timeline),
        rows=tuple((f"device {d}", _TOP + d * ROW + 22.0) for d in range(devices)),
        ticks=tuple(
            (format_seconds(time), LEFT + time * scale) for time in _ticks(simulation.step_s)
        ),
        width=WIDTH,
        height=_TOP + devices * ROW + 4.0,
    )


def _kind(span: Span) -> str:
    if span.lane is Lane.UPDATE:
        return "update"
    if span.recompute:
        return "again"
    return span.action.phase.name.lower()


def _bar(span: Span, scale: float, with_stage: bool) -> Bar:
    top, height = _HEIGHTS[span.lane]
    action = span.action
    width = (span.end_s - span.start_s) * scale
    computes = span.lane in (Lane.DEVICE, Lane.UPDATE)
    text = _text(span, with_stage) if computes else ""
    doing = {
        Lane.DEVICE: f"{_WORK[_kind(span)]} of stage {action.stage}",
        Lane.UPDATE: f"stage {action.stage} reduces gradients and updates its parameters",
        Lane.RECEIVE: f"stage {action.stage} receives",
        Lane.GRADIENT: f"stage {action.stage} returns gradients",
    }[span.lane]
    whose = "" if span.lane is Lane.UPDATE else f", micro-batch {action.microbatch}"
    return Bar(
        x=LEFT + span.start_s * scale,
        y=_TOP + span.device * ROW + top,
        width=width,
        height=height,
        kind=_kind(span) if computes else "transfer",
        text=text if width >= len(text) * _LETTER + 3 else "",
        tip=f"{action}: {doing}{whose}, {format_seconds(span.start_s)} to "
        f"{format_seconds(span.end_s)}",
    )


def _text(span: Span, with_stage: bool) -> str:
    """A bar's label: the micro-batch, or the whole action where devices run several stages."""
    action = span.action
    if span.lane is Lane.UPDATE:
        return f"{action.stage}U" if with_stage else "U"
    if not with_stage:
        return f"R{action.microbatch}" if span.recompute else str(action.microbatch)
    return str(action).replace(action.phase.value, "R") if span.recompute else str(action)


def _ticks(until_s: float) -> list[float]:
    """At most `_TICKS` round times from 0 to `until_s`."""
    if until_s <= 0:
        return [0.0]
    raw = until_s / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [index * step for index in range(int(until_s / step) + 1)]


_LANES: Mapping[Lane, tuple[int, str]] = {
    Lane.DEVICE: (0, "computes"),
    Lane.UPDATE: (0, "computes"),
    Lane.RECEIVE: (1, "receives"),
    Lane.GRADIENT: (2, "returns gradients"),
}
"""For every lane, its row among those of a device, and the row's title."""


def format_trace(plan: Plan) -> str:
    """The trace as JSON text: a process for every device, a row for every lane; times in µs."""
    spans = timeline(plan).timeline
    titles: list[dict[str, object]] = []
    for device in range(len(plan.orders)):
        titles.append(_title("process_name", device, 0, f"device {device}"))
        rows = dict(_LANES.values()).items()
        titles.extend(_title("thread_name", device, row, title) for row, title in rows)
    return json.dumps({"traceEvents": [*titles, *map(_event, spans)]}) + "\n"


def _title(kind: str, device: int, row: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": device, "tid": row, "args": {"name": text}}


def _event(span: Span) -> dict[str, object]:
    update = span.lane is Lane.UPDATE
    work = "recompute" if span.recompute else span.action.phase.name.lower()
    name = f"{work} for {span.action}" if span.recompute else str(span.action)
    return {
        "ph": "X",
        "name": f"update of stage {span.action.stage}" if update else name,
        "cat": "update" if update else work,
        "pid": span.device,
        "tid": _LANES[span.lane][0],
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"stage": span.action.stage, "micro-batch": span.action.microbatch},
    }
