"""Tables of what was compared: with no pipeline, in a search, in a sweep."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.fields import own_fields
from gpipe_compiler.plan.pareto import EQUAL, Choice, Frontier, ParetoPoint, SearchStatus
from gpipe_compiler.plan.plan import SweepPoint
from gpipe_compiler.plan.stages import WholeModel
from gpipe_compiler.report.facts import device_bytes, fullest_device
from gpipe_compiler.report.terminal import table_of
from gpipe_compiler.runtime.wording import counted, printable
from gpipe_compiler.text.units import format_bytes, format_rate, format_seconds, format_share

MOST_ROWS = 16
"""Rows of the table, beside those on the frontier."""

_NOTABLE = 1.05
"""The smallest factor of a second cause that is mentioned."""

_TWICE = 1.995
"""The ratio from which on it is printed as a factor, and not in percent."""


def show_frontier(frontier: Frontier) -> RenderableType:
    shown = frontier.shortened(MOST_ROWS)
    rows = [row(point, frontier) for point in shown.points]
    table = table_of("settings, best first", rows, words={"why not"}, what="settings")
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


def frontier_document(frontier: Frontier) -> dict[str, Any]:
    fields = own_fields(frontier)
    for row, point in zip(fields["points"], frontier.points, strict=True):
        row["samples_per_s"] = frontier.samples_per_s(point)
        row["reason"] = reason(point, frontier)
    return fields


def row(point: ParetoPoint, frontier: Frontier) -> dict[str, str]:
    choice, known = point.choice, point.status is SearchStatus.PLANNED
    bound = "≥ " if point.status in (SearchStatus.SLOWER, SearchStatus.LARGER) else ""
    figures = known or bool(bound)
    mark = "~ " if _is_estimated(point, frontier) else bound
    return {
        "": "*" if point.undominated else "",
        "stages": str(choice.stages),
        "devices": str(choice.devices),
        "schedule": choice.schedule.value,
        "micro-batches": str(choice.microbatches),
        "remat": choice.remat.value,
        "step": f"{bound}{format_seconds(point.step_s)}" if figures else "",
        "samples/s": format_rate(frontier.samples_per_s(point)) if known else "",
        "bubble": format_share(point.bubble) if known else "",
        "peak": f"{mark}{format_bytes(point.told_bytes)}" if figures else "",
        "why not": reason(point, frontier),
    }


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


# --- a sweep: what each number of devices, or each size of mini-batch, gives ---------------------

SWEEP_COLUMNS = (
    *("devices", "batch", "micro-batches", "step", "samples/s", "fullest device", "fits"),
    *("one device", "data parallel"),
)
"""The last two: samples/s of the model as it is, and of replicas on all of the devices."""


def show_sweep(points: Sequence[SweepPoint]) -> RenderableType:
    table = table_of(
        "sweep", [_sweep_row(point) for point in points], words={"fits"}, what="settings"
    )
    return Group(table, *(Text(line) for line in sweep_notes(points)))


def sweep_notes(points: Sequence[SweepPoint]) -> list[str]:
    """The largest mini-batch that fits, and the most samples a second."""
    fitting = [point for point in points if point.fits]
    if not fitting:
        return ["Nothing fits."]
    found = []
    if len({point.batch_size for point in points}) > 1:
        largest = max(fitting, key=lambda point: (point.batch_size, -point.devices))
        found.append(
            f"The largest mini-batch of these that fits: {largest.batch_size:,} samples, on "
            f"{counted(largest.devices, 'device')}."
        )
    fastest = max(fitting, key=lambda point: (_rate(point), -point.devices, -point.batch_size))
    found.append(
        f"The most samples a second of a pipeline that fits: {format_rate(_rate(fastest))}, on "
        f"{counted(fastest.devices, 'device')} with a mini-batch of {fastest.batch_size:,}."
    )
    return found


def sweep_document(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """The same for JSON: without the plans' own parts."""
    return [
        {
            "devices": point.devices,
            "batch_size": point.batch_size,
            "problem": point.problem or None,
            **({} if point.plan is None else _figures(point.plan)),
        }
        for point in points
    ]


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule.value,
        "fits": plan.fits,
        "step_s": plan.prediction.step_s,
        "here_s": plan.here_s,
        "device_bytes": list(device_bytes(plan)),
        "whole": [own_fields(whole) for whole in plan.whole],
    }


def _rate(point: SweepPoint) -> float:
    assert point.plan is not None
    return point.batch_size / point.plan.here_s if point.plan.here_s > 0 else 0.0


def _sweep_row(point: SweepPoint) -> dict[str, str]:
    cells = {"devices": str(point.devices or ""), "batch": f"{point.batch_size:,}"}
    plan = point.plan
    if plan is None:
        return (
            dict.fromkeys(SWEEP_COLUMNS, "") | cells | {"fits": f"no: {printable(point.problem)}"}
        )
    needed, memory = fullest_device(plan)
    figures = {
        "micro-batches": f"{plan.microbatches} x {plan.microbatch_size}",
        "step": format_seconds(plan.here_s),
        "samples/s": format_rate(_rate(point)),
        "fullest device": f"{format_bytes(needed)} of {format_bytes(memory)}",
        "fits": "yes" if plan.fits else "no",
    }
    names = SWEEP_COLUMNS[-2:]
    others = {name: _other(plan, index) for index, name in enumerate(names[: len(plan.whole)])}
    return dict.fromkeys(SWEEP_COLUMNS, "") | cells | figures | others


def _other(plan: Plan, index: int) -> str:
    whole = plan.whole[index]
    if not whole.possible:
        return "no"
    return format_rate(plan.batch_size / whole.here_s) if whole.here_s > 0 else ""


# --- whether a pipeline is worth it: the same devices without one, and what the pipeline buys -----

ALIKE = 1.03
"""Steps that differ by a smaller factor are alike: predictions cannot tell which is faster."""

WAY_COLUMNS = ("way", "devices", "fits", "fullest device", "step", "samples/s")


def first_question(plan: Plan) -> RenderableType:
    """The ways as a table, and in a sentence which is the best; nothing for a single device."""
    if not plan.whole:
        return Group()
    table = table_of("is a pipeline worth it?", way_rows(plan), words={"way", "fits"}, what="ways")
    return Group(table, Text(verdict(plan)), Text(""))


def way_rows(plan: Plan) -> list[dict[str, str]]:
    """A row of cells by column for each way."""
    found = [_way_row(plan, whole) for whole in plan.whole]
    count = len(plan.orders) * plan.replicas
    pipeline = WholeModel(count, plan.prediction.step_s, plan.here_s, *fullest_device(plan))
    return [*found, _way_row(plan, pipeline) | {"way": "this pipeline"}]


def _way_row(plan: Plan, whole: WholeModel) -> dict[str, str]:
    cells = {"way": _name(whole), "devices": str(whole.devices)}
    if whole.problem:
        return (
            cells | {"fits": f"no: {printable(whole.problem)}"} | dict.fromkeys(WAY_COLUMNS[3:], "")
        )
    rate = plan.batch_size / whole.here_s if whole.here_s > 0 else 0.0
    return cells | {
        "fits": "yes" if whole.possible else "no",
        "fullest device": f"{format_bytes(whole.peak_bytes)} of {format_bytes(whole.memory)}",
        "step": format_seconds(whole.here_s),
        "samples/s": format_rate(rate),
    }


def _name(whole: WholeModel) -> str:
    return "the model as it is" if whole.devices == 1 else "data parallel"


def verdict(plan: Plan) -> str:
    """Which way is the best, and what the pipeline buys; "" for a single device."""
    if not plan.whole:
        return ""
    fitting = [way for way in plan.whole if way.possible]
    if not fitting and not plan.fits:
        return "Nothing fits: neither the whole model on a device, nor this pipeline."
    if not fitting:
        return (
            "The pipeline is what makes it possible: the whole model does not fit on a device."
            if not any(way.problem for way in plan.whole)
            else "The pipeline is what makes it possible: nothing else can run this mini-batch."
        )
    best = min(fitting, key=lambda way: (way.here_s, way.devices))
    fewest = next(way for way in fitting if way.here_s <= best.here_s * ALIKE)
    if not plan.fits:
        return f"The pipeline does not fit, and is not needed: {_phrase(fewest)} does it."
    if plan.here_s * ALIKE < best.here_s:
        gains = ", ".join(f"{way.here_s / plan.here_s:.3g} times {_phrase(way)}" for way in fitting)
        return f"The pipeline is the fastest: {gains}.{_left_out(plan)}"
    factor = plan.here_s / fewest.here_s
    how = "as fast" if 1 / ALIKE <= factor <= ALIKE else f"{factor:.3g} times as fast"
    return f"The pipeline is not needed: {_phrase(fewest)} is {how}.{_left_out(plan)}"


def _phrase(whole: WholeModel) -> str:
    if whole.devices == 1:
        return "one device alone"
    return f"data parallelism over {counted(whole.devices, 'device')}"


def _left_out(plan: Plan) -> str:
    names = [_phrase(way) for way in plan.whole if not way.possible]
    if not names:
        return ""
    sentence = " and ".join(names)
    return f" {sentence[0].upper()}{sentence[1:]} cannot run it."
