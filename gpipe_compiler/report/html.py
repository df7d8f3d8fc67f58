"""The report of a plan: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from gpipe_compiler.errors import UsageError
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.timeline import timeline
from gpipe_compiler.report.facts import boundaries, modules_of, parameter_count, placed
from gpipe_compiler.report.frontier import COLUMNS, row
from gpipe_compiler.report.gantt import Gantt, gantt
from gpipe_compiler.report.memory import CURVE_HEIGHT, CURVE_WIDTH, categories, memory_rows
from gpipe_compiler.report.pages import render
from gpipe_compiler.report.picture import draw, pipeline_drawing
from gpipe_compiler.report.text import Held, constraint_rows, headline, prediction_rows
from gpipe_compiler.runtime.schedule.actions import Phase
from gpipe_compiler.runtime.spec import Remat

_MOST_DRAWN = 60
"""Boundary values up to which the picture of the pipeline is one that can be read."""


_MOST_ACTIONS = 10_000
"""Actions of a step up to which it is drawn."""


def write_report(plan: Plan, path: Path, validation: Held | None = None) -> Path:
    """Writes the report; returns its path.

    Args:
        validation: None where nothing was compared (yet).
    """
    path.write_text(format_report(plan, validation), encoding="utf-8")
    return path


def _settings(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of every setting that the plan was chosen from."""
    frontier = plan.frontier
    return [] if frontier is None else [row(point, frontier) for point in frontier.points]


def format_report(plan: Plan, validation: Held | None = None) -> str:
    """The report as HTML text."""
    slowest = max((s.forward_s + s.backward_s for s in plan.stages), default=0.0)
    return render(
        "report.html.jinja",
        plan=plan,
        headline=headline(plan).plain,
        parameters=parameter_count(plan),
        facts=[*constraint_rows(plan), *prediction_rows(plan)],
        gantt=_gantt(plan),
        setting_columns=COLUMNS,
        settings=_settings(plan),
        split=any(action.phase is Phase.WEIGHT for order in plan.orders for action in order),
        updates=any(stage.update_s > 0 for stage in plan.stages),
        placed=placed(plan),
        stages=[(stage, modules_of(plan, stage)) for stage in plan.stages],
        memory=memory_rows(plan),
        categories=categories(plan),
        curve=(CURVE_WIDTH, CURVE_HEIGHT),
        slowest=slowest,
        recomputes=any(stage.remat is not Remat.NONE for stage in plan.stages),
        boundaries=boundaries(plan),
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
