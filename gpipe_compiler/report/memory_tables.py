"""What holds the memory of a plan's devices, and what would save some, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_compiler.errors import UsageError
from gpipe_compiler.options.choices import SHOWN_HOLDERS
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import CATEGORIES, DeviceMemory, Holder
from gpipe_compiler.report.remat import remat_table
from gpipe_compiler.report.tables import add_rows, figure_table
from gpipe_compiler.report.text import headline
from gpipe_compiler.text.units import (
    format_bytes,
    format_seconds,
    format_share,
    format_source,
    short_path,
    short_source,
)

_MOST_DEVICES = 8
"""Devices whose holders are shown; of more, those of the fullest."""

_MOST_COLUMNS = 6
"""Devices that have a column of their own among the remedies."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the user's program something was made; "" for what is unknown.

    Attributes:
        call: what made it: `Conv2d`.
        module: path of the module.
        source: `file:line`.
    """

    call: str = ""
    module: str = ""
    source: str = ""

    @classmethod
    def of(cls, plan: Plan, holder: Holder) -> Place:
        """That of what is in memory."""
        note = plan.note_of.get(holder.op)
        return cls() if note is None else cls(note.label, note.module, note.source)


def check_told(plan: Plan, device: int | None) -> None:
    """Makes sure that the plan tells of its memory, and that there is such a device.

    Raises:
        UsageError: when it does not, or there is none.
    """
    memory = plan.prediction.memory
    if not memory:
        raise UsageError(
            f"the plan of {plan.name} does not tell what holds its memory",
            hint="stages of ONNX models are not rehearsed; other packages are to be compiled again",
        )
    if device is not None and not 0 <= device < len(memory):
        raise UsageError(
            f"there is no device {device}", hint=f"devices count from 0 to {len(memory) - 1}"
        )


def show_memory(plan: Plan, device: int | None = None, most: int = SHOWN_HOLDERS) -> RenderableType:
    """Peaks, what holds them, what recomputing would save, and the remedies.

    Args:
        device: whose holders are shown; None for those of all, or of the fullest.
        most: holders that are shown of each.

    Raises:
        UsageError: when the plan does not tell of its memory, or there is no such device.
    """
    check_told(plan, device)
    parts: list[RenderableType] = [headline(plan), peak_table(plan)]
    parts.extend(holder_table(plan, rank, most) for rank in _shown(plan, device))
    if plan.training and any(stage.frontier for stage in plan.stages):
        parts.append(remat_table(plan))
    if plan.what_if is not None and plan.what_if.remedies:
        parts.append(remedy_table(plan))
    else:
        parts.append(Text("what would save memory is told of packages compiled with --remedies"))
    return Group(*parts)


def _shown(plan: Plan, device: int | None) -> Sequence[int]:
    """The devices whose holders are shown."""
    if device is not None:
        return (device,)
    memory = plan.prediction.memory
    fullest = sorted(range(len(memory)), key=lambda rank: -memory[rank].peak)
    return sorted(rank for rank in fullest[:_MOST_DEVICES] if memory[rank].holders)


def peak_table(plan: Plan) -> Table:
    """One row for every device: its peak, when that is, and what it is made of."""
    memory = plan.prediction.memory
    found = [c for c in CATEGORIES if any(device.of(c) for device in memory)]
    columns = ["device", "stages", "peak", "of", "while", *(c.value for c in found)]
    table = figure_table("peak of each device, and what it is made of", columns, words={"stages"})
    rows = [
        (
            str(rank),
            _numbers(told.stages),
            format_bytes(told.peak),
            format_bytes(machine.memory),
            told.action,
            *(format_bytes(told.of(c)) if told.of(c) else "" for c in found),
        )
        for rank, (told, machine) in enumerate(zip(memory, plan.devices, strict=True))
    ]
    add_rows(table, rows, "devices")
    return table


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))


def holder_table(plan: Plan, rank: int, most: int) -> Table:
    """What is in the memory of a device at its peak, the largest first."""
    told = plan.prediction.memory[rank]
    several = len(told.stages) > 1
    columns = ["bytes", "share", "what", "how many", *(["stage"] if several else [])]
    words = {"what", "for", "made by", "line"}
    noun = f"stage{'s' if several else ''} {_numbers(told.stages)}"
    title = (
        f"what holds the peak of device {rank} ({noun}), {format_bytes(told.peak)} "
        f"while {_action(told)}"
    )
    table = figure_table(title, [*columns, "for", "made by", "line"], words)
    rows: list[tuple[str, ...]] = []
    for holder in told.holders[:most]:
        place = Place.of(plan, holder)
        rows.append(
            (
                format_bytes(holder.bytes),
                format_share(holder.bytes / told.peak),
                _what(plan, holder),
                str(holder.count),
                *([str(holder.stage) if holder.stage >= 0 else ""] if several else []),
                holder.category.value,
                f"{place.call} {short_path(place.module)}".strip(),
                short_source(place.source) if place.source else "",
            )
        )
    rest = told.peak - sum(holder.bytes for holder in told.holders[:most])
    if rest > 0:
        rows.append((format_bytes(rest), format_share(rest / told.peak), "all the rest", ""))
    add_rows(table, [(*row, *[""] * (len(table.columns) - len(row))) for row in rows], "storages")
    return table


def _what(plan: Plan, holder: Holder) -> str:
    """What a holder is; of a value that stages hand on, with its type."""
    note = plan.note_of.get(holder.op)
    if note is None:
        return holder.what
    types = dict(zip(note.outputs, note.types, strict=True))
    told = types.get(holder.what.removeprefix("gradient of "), "")
    return f"{holder.what}, {told}" if told else holder.what


def _action(told: DeviceMemory) -> str:
    """When a peak is, in words."""
    return "the optimizer steps" if told.action == "update" else f"{told.action} runs"


def remedy_table(plan: Plan) -> Table:
    """One row for every other setting, what saves most on the fullest device first."""
    assert plan.what_if is not None
    now = plan.prediction.device_bytes
    devices = range(len(now)) if len(now) <= _MOST_COLUMNS else ()
    columns = ["setting", "peak", "saves", "step", *(f"device {rank}" for rank in devices)]
    title = "what other settings come to, with the same stages (peak of the fullest device)"
    table = figure_table(title, columns, words={"setting"})
    first = (
        "as it is",
        format_bytes(max(now)),
        "",
        format_seconds(plan.prediction.step_s),
        *(format_bytes(now[rank]) for rank in devices),
    )
    rows: list[tuple[str, ...]] = [first]
    for remedy in sorted(plan.what_if.remedies, key=lambda remedy: max(remedy.device_bytes)):
        peak = max(remedy.device_bytes)
        rows.append(
            (
                remedy.change,
                format_bytes(peak),
                _saved(max(now) - peak),
                format_seconds(remedy.step_s),
                *(format_bytes(remedy.device_bytes[rank]) for rank in devices),
            )
        )
    add_rows(table, rows, "settings")
    return table


def _saved(size: int) -> str:
    if size == 0:
        return "nothing"
    return format_bytes(size) if size > 0 else f"{format_bytes(-size)} more"


def memory_document(plan: Plan, device: int | None = None) -> dict[str, Any]:
    """The same for programs: all that the plan tells of memory, with source lines.

    Raises:
        UsageError: as `show_memory`.
    """
    check_told(plan, device)
    memory = plan.prediction.memory
    what_if = plan.what_if.to_fields() if plan.what_if is not None else {}
    return {
        "name": plan.name,
        "schedule": plan.schedule.value,
        "microbatches": plan.microbatches,
        "step_s": plan.prediction.step_s,
        "devices": [
            _device_fields(plan, rank)
            for rank in (range(len(memory)) if device is None else (device,))
        ],
        "frontiers": [
            [
                {
                    "remat": point.remat.value,
                    "segments": point.segments,
                    "peak_bytes": point.peak_bytes,
                    "recompute_s": point.recompute_s,
                }
                for point in stage.frontier
            ]
            for stage in plan.stages
        ],
        "remedies": [
            remedy | {"saves": max(plan.prediction.device_bytes) - max(remedy["device_bytes"])}
            for remedy in what_if.get("remedies", [])
        ],
    }


def _device_fields(plan: Plan, rank: int) -> dict[str, Any]:
    told = plan.prediction.memory[rank]
    fields = told.to_fields() | {"device": rank, "memory": plan.devices[rank].memory}
    for holder, known in zip(fields["holders"], told.holders, strict=True):
        place = Place.of(plan, known)
        source = format_source(place.source) if place.source else ""
        holder.update(call=place.call, module=place.module, source=source)
    return fields
