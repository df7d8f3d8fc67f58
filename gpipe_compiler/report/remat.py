"""What recomputing could save in each stage, and for how much time."""

from __future__ import annotations

from rich.table import Table

from gpipe_compiler.plan import Plan, RematPoint
from gpipe_compiler.report.tables import add_rows, figure_table
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.text.units import format_bytes, format_seconds

SHOWN = 5
"""Points of a stage's frontier that are shown: the first, the last, and some between."""


def remat_table(plan: Plan) -> Table:
    """One row for every stage: from keeping everything to the least memory."""
    title = "time against memory (peak of a stage, and what it recomputes of a mini-batch for it)"
    rows = []
    for stage in plan.stages:
        points = spread(stage.frontier)
        cells = [_cell(point) for point in points]
        rows.append((str(stage.index), *cells, *[""] * (SHOWN - len(cells))))
    names = ["fastest", *(["", "", ""]), "least memory"]
    table = figure_table(title, ["stage", *names], words=set(names))
    add_rows(table, rows, "stages")
    return table


def spread(points: tuple[RematPoint, ...]) -> list[RematPoint]:
    """Some of a frontier, the first and the last among them, evenly by their memory."""
    if len(points) <= SHOWN:
        return list(points)
    first, last = points[0].peak_bytes, points[-1].peak_bytes
    goals = [first + (last - first) * index / (SHOWN - 1) for index in range(SHOWN)]
    places = {
        min(range(len(points)), key=lambda i: abs(points[i].peak_bytes - goal)) for goal in goals
    }
    return [points[place] for place in sorted(places | {0, len(points) - 1})]


def _cell(point: RematPoint) -> str:
    text = format_bytes(point.peak_bytes)
    match point.remat:
        case Remat.NONE:
            return text
        case Remat.FULL:
            return f"{text}, {format_seconds(point.recompute_s)}: full"
        case Remat.SEGMENTS:
            what = counted(point.segments, "segment")
            return f"{text}, {format_seconds(point.recompute_s)}: {what}"
