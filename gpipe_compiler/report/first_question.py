"""Whether a pipeline is worth it: the same devices without one, and what the pipeline buys."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.stages import WholeModel
from gpipe_compiler.report.facts import fullest_device
from gpipe_compiler.report.terminal import table_of
from gpipe_compiler.runtime.wording import counted, printable
from gpipe_compiler.text.units import format_bytes, format_rate, format_seconds

ALIKE = 1.03
"""Steps that differ by a smaller factor are alike: predictions cannot tell which is faster."""

COLUMNS = ("way", "devices", "fits", "fullest device", "step", "samples/s")


def first_question(plan: Plan) -> RenderableType:
    """The ways as a table, and in a sentence which is the best; nothing for a single device."""
    if not plan.whole:
        return Group()
    table = table_of("is a pipeline worth it?", way_rows(plan), words={"way", "fits"}, what="ways")
    return Group(table, Text(verdict(plan)), Text(""))


def way_rows(plan: Plan) -> list[dict[str, str]]:
    """A row of cells by column for each way."""
    found = [_row(plan, whole) for whole in plan.whole]
    count = len(plan.orders) * plan.replicas
    pipeline = WholeModel(count, plan.prediction.step_s, plan.here_s, *fullest_device(plan))
    return [*found, _row(plan, pipeline) | {"way": "this pipeline"}]


def _row(plan: Plan, whole: WholeModel) -> dict[str, str]:
    cells = {"way": _name(whole), "devices": str(whole.devices)}
    if whole.problem:
        return cells | {"fits": f"no: {printable(whole.problem)}"} | dict.fromkeys(COLUMNS[3:], "")
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
    """Which ways do not fit."""
    names = [_phrase(way) for way in plan.whole if not way.possible]
    if not names:
        return ""
    sentence = " and ".join(names)
    return f" {sentence[0].upper()}{sentence[1:]} cannot run it."
