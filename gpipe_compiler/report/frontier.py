"""The table of the settings that were compared: the chosen one, and why the others lose."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_compiler.plan.fields import own_fields
from gpipe_compiler.plan.pareto import EQUAL, Choice, Frontier, ParetoPoint, SearchStatus
from gpipe_compiler.report.terminal import cell, figure_table
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.text.units import format_bytes, format_rate, format_seconds, format_share

MOST_ROWS = 16
"""Rows of the table, beside those on the frontier."""

_NOTABLE = 1.05
"""The smallest factor of a second cause that is mentioned."""

_TWICE = 1.995
"""The ratio from which on it is printed as a factor, and not in percent."""


def show_frontier(frontier: Frontier) -> RenderableType:
    shown = frontier.shortened(MOST_ROWS)
    table = frontier_table(shown)
    left = [p for p in frontier.points if p not in set(shown.points)]
    notes = ["* no other that fits is faster without being larger, or smaller without being slower"]
    if any(_is_estimated(point, frontier) for point in shown.points):
        notes.append("~ estimated; what is planned in full is played through, which is exact")
    if left:
        statuses = Counter(_SHORT[point.status] for point in left)
        parts = ", ".join(f"{count:,} {words}" for words, count in statuses.items())
        notes.append(f"{counted(len(left), 'further setting')}: {parts}; all are in --json")
    return Group(table, *(Text(note) for note in notes))


_SHORT = {
    SearchStatus.PLANNED: "planned",
    SearchStatus.SLOWER: "not planned, as their bounds lose",
    SearchStatus.LARGER: "that cannot fit",
    SearchStatus.REFUSED: "that cannot be planned",
    SearchStatus.NOT_REACHED: "not looked at, as time was up",
}


def document(frontier: Frontier) -> dict[str, Any]:
    fields = own_fields(frontier)
    for row, point in zip(fields["points"], frontier.points, strict=True):
        row["samples_per_s"] = frontier.samples_per_s(point)
        row["reason"] = reason(point, frontier)
    return fields


COLUMNS = (
    *("", "stages", "devices", "schedule", "micro-batches", "remat"),
    *("step", "samples/s", "bubble", "peak", "why not"),
)
"""The columns of the table."""


def frontier_table(frontier: Frontier) -> Table:
    table = figure_table("settings, best first", COLUMNS, words={"why not"})
    for point in frontier.points:
        table.add_row(*map(cell, row(point, frontier)))
    return table


def row(point: ParetoPoint, frontier: Frontier) -> tuple[str, ...]:
    choice, known = point.choice, point.status is SearchStatus.PLANNED
    bound = "≥ " if point.status in (SearchStatus.SLOWER, SearchStatus.LARGER) else ""
    figures = known or bool(bound)
    mark = "~ " if _is_estimated(point, frontier) else bound
    return (
        "*" if point.undominated else "",
        str(choice.stages),
        str(choice.devices),
        choice.schedule.value,
        str(choice.microbatches),
        choice.remat.value,
        f"{bound}{format_seconds(point.step_s)}" if figures else "",
        format_rate(frontier.samples_per_s(point)) if known else "",
        format_share(point.bubble) if known else "",
        f"{mark}{format_bytes(point.told_bytes)}" if figures else "",
        reason(point, frontier),
    )


def _is_estimated(point: ParetoPoint, frontier: Frontier) -> bool:
    """Whether the peak of a plan is less well known than that of others."""
    some = any(other.exact_bytes for other in frontier.points)
    return some and point.status is SearchStatus.PLANNED and not point.exact_bytes


def reason(point: ParetoPoint, frontier: Frontier) -> str:
    match point.status:
        case SearchStatus.REFUSED:
            return point.problem
        case SearchStatus.NOT_REACHED:
            return "not looked at: time was up"
        case SearchStatus.LARGER:
            return f"does not fit: at least {format_bytes(point.over_bytes)} too much"
        case SearchStatus.SLOWER:
            return "not planned: its bounds already lose"
    if point.over_bytes:
        return f"does not fit by {format_bytes(point.over_bytes)}"
    chosen = frontier.chosen
    if chosen is None or point.choice == chosen.choice:
        return "chosen"
    return _beside(point, chosen)


def _beside(point: ParetoPoint, chosen: ParetoPoint) -> str:
    """Why a plan that fits loses to the chosen one."""
    difference = point.peak_bytes - chosen.peak_bytes
    ratio = _ratio(point.step_s, chosen.step_s)
    if ratio <= 1 + EQUAL:
        if difference:
            return f"same speed, {format_bytes(difference)} more memory"
        return f"the same, with {_what_differs(point.choice, chosen.choice)}"
    slower = f"{format_ratio(ratio)} slower: {causes(point, chosen)}"
    less = f"; {format_bytes(-difference)} less" if point.undominated else ""
    return f"{slower}{less}"


def format_ratio(ratio: float) -> str:
    """How many times as much: `2.1x`; small differences in percent: `3.2%`."""
    return f"{ratio:.2g}x" if ratio >= _TWICE else f"{100 * (ratio - 1):.2g}%"


def _more(ratio: float) -> str:
    """How much more, of what costs that many times as much."""
    return f"{format_ratio(ratio)} {'as much' if ratio >= _TWICE else 'more'}"


def causes(point: ParetoPoint, chosen: ParetoPoint) -> str:
    """What makes a step longer than that of the chosen: the most of it first.

    The device time of a step is work, running forwards again, and waiting. So the ratio of two
    steps is the product of four: of the numbers of devices, of the work on them, of what is run
    again beside it, and of what is waited beside both.
    """
    devices, work_s, again, waiting = _parts(point)
    their_devices, their_work_s, their_again, their_waiting = _parts(chosen)
    longer = _ratio(work_s, their_work_s)
    count, other = point.choice.microbatches, chosen.choice.microbatches
    size = f"{'smaller' if count > other else 'larger'} micro-batches cost {_more(longer)}"
    found = [
        (_ratio(their_devices, devices), f"on {devices}, not {their_devices} devices"),
        (longer, size if count != other else f"the ops cost {_more(longer)}"),
        (_ratio(again, their_again), f"recomputing {point.recompute:.0%}"),
        (_ratio(waiting, their_waiting), f"bubble {point.bubble:.0%}"),
    ]
    found.sort(key=lambda cause: -cause[0])
    named = [words for factor, words in found[:2] if factor >= _NOTABLE]
    return ", ".join(named or [found[0][1]])


def _parts(point: ParetoPoint) -> tuple[int, float, float, float]:
    """A step as a quotient of products: work_s * again * waiting / devices, devices first."""
    busy = 1 - point.bubble
    useful = busy - point.recompute
    devices = point.choice.devices
    return devices, point.step_s * devices * useful, _ratio(busy, useful), _ratio(1, busy)


def _ratio(one: float, other: float) -> float:
    if other > 0:
        return one / other
    return math.inf if one > 0 else 1.0


def _what_differs(ours: Choice, theirs: Choice) -> str:
    """The first thing in which two choices differ, as the first has it."""
    if ours.devices != theirs.devices:
        return counted(ours.devices, "device")
    if ours.stages != theirs.stages:
        return counted(ours.stages, "stage")
    if ours.schedule is not theirs.schedule:
        return ours.schedule.value
    if ours.remat is not theirs.remat:
        return f"remat {ours.remat.value}"
    return counted(ours.microbatches, "micro-batch", "es")
