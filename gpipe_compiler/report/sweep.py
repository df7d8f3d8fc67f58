"""A sweep as a table: what each number of devices, or each size of mini-batch, gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.fields import own_fields
from gpipe_compiler.plan.plan import SweepPoint
from gpipe_compiler.report.facts import device_bytes, fullest_device
from gpipe_compiler.report.terminal import table_of
from gpipe_compiler.runtime.wording import counted, printable
from gpipe_compiler.text.units import format_bytes, format_rate, format_seconds

COLUMNS = (
    *("devices", "batch", "micro-batches", "step", "samples/s", "fullest device", "fits"),
    *("one device", "data parallel"),
)
"""The last two: samples/s of the model as it is, and of replicas on all of the devices."""


def show_sweep(points: Sequence[SweepPoint]) -> RenderableType:
    table = table_of("sweep", [_row(point) for point in points], words={"fits"}, what="settings")
    return Group(table, *(Text(line) for line in notes(points)))


def notes(points: Sequence[SweepPoint]) -> list[str]:
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


def document(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
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


def _row(point: SweepPoint) -> dict[str, str]:
    cells = {"devices": str(point.devices or ""), "batch": f"{point.batch_size:,}"}
    plan = point.plan
    if plan is None:
        return dict.fromkeys(COLUMNS, "") | cells | {"fits": f"no: {printable(point.problem)}"}
    needed, memory = fullest_device(plan)
    figures = {
        "micro-batches": f"{plan.microbatches} x {plan.microbatch_size}",
        "step": format_seconds(plan.here_s),
        "samples/s": format_rate(_rate(point)),
        "fullest device": f"{format_bytes(needed)} of {format_bytes(memory)}",
        "fits": "yes" if plan.fits else "no",
    }
    names = COLUMNS[-2:]
    others = {name: _other(plan, index) for index, name in enumerate(names[: len(plan.whole)])}
    return dict.fromkeys(COLUMNS, "") | cells | figures | others


def _other(plan: Plan, index: int) -> str:
    whole = plan.whole[index]
    if not whole.possible:
        return "no"
    return format_rate(plan.batch_size / whole.here_s) if whole.here_s > 0 else ""
