"""The simulated step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.timeline import timeline
from gpipe_compiler.simulate.step import Lane, Span

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


def write_trace(plan: Plan, path: Path) -> Path:
    """Writes the trace; returns its path."""
    path.write_text(format_trace(plan), encoding="utf-8")
    return path


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
