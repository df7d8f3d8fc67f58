"""The memory of a plan's devices and how to save some of it, as tables and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpipe_compiler.cluster.machines import MARGIN
from gpipe_compiler.errors import UsageError
from gpipe_compiler.options import SHOWN_HOLDERS
from gpipe_compiler.plan import Plan, RematPoint
from gpipe_compiler.plan.fields import to_fields
from gpipe_compiler.plan.memory_curve import CATEGORIES, PeakHolder
from gpipe_compiler.plan.stages import OpNote
from gpipe_compiler.report.facts import headline
from gpipe_compiler.report.terminal import add_rows, figure_table, table_of
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.runtime.wording import counted
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


def check_memory(plan: Plan, device: int | None) -> None:
    """Checks that the plan has memory traces, and such a device.

    Raises:
        UsageError: when it has none.
    """
    memory = plan.prediction.memory
    if not memory:
        raise UsageError(
            f"the plan of {plan.name} does not say what holds its memory",
            hint="stages of ONNX models are not traced; other packages are to be compiled again",
        )
    if device is not None and not 0 <= device < len(memory):
        raise UsageError(
            f"there is no device {device}", hint=f"devices count from 0 to {len(memory) - 1}"
        )


def show_memory(plan: Plan, device: int | None = None, most: int = SHOWN_HOLDERS) -> RenderableType:
    """Peaks, the tensors in them, what recomputing would save, and other settings.

    Args:
        device: whose holders are shown; None for those of all, or of the fullest.
        most: holders that are shown of each.

    Raises:
        UsageError: when the plan does not say what holds its memory, or there is no such device.
    """
    check_memory(plan, device)
    parts: list[RenderableType] = [headline(plan), peak_table(plan)]
    parts.extend(holder_table(plan, rank, most) for rank in _shown(plan, device))
    if plan.training and any(stage.frontier for stage in plan.stages):
        parts.append(remat_table(plan))
    if plan.what_if is not None and plan.what_if.remedies:
        parts.append(remedy_table(plan))
    else:
        parts.append(Text("packages compiled with --remedies say what would save memory"))
    return Group(*parts)


def _shown(plan: Plan, device: int | None) -> Sequence[int]:
    if device is not None:
        return (device,)
    memory = plan.prediction.memory
    fullest = sorted(range(len(memory)), key=lambda rank: -memory[rank].peak)
    return sorted(rank for rank in fullest[:_MOST_DEVICES] if memory[rank].holders)


def peak_table(plan: Plan) -> Table:
    """One row for every device: its peak, when that is, and what it is made of."""
    memory = plan.prediction.memory
    found = [c for c in CATEGORIES if any(device.of(c) for device in memory)]
    allocated = any(device.reserved for device in memory)
    rows = [
        {
            "device": str(rank),
            "stages": _numbers(held.stages),
            "peak": format_bytes(held.peak),
            **({"reserved": format_bytes(held.reserved)} if allocated else {}),
            "of": format_bytes(machine.memory),
            "while": held.action,
            **{c.value: format_bytes(held.of(c)) if held.of(c) else "" for c in found},
        }
        for rank, (held, machine) in enumerate(zip(memory, plan.devices, strict=True))
    ]
    title = "peak of each device, and what it is made of"
    return table_of(title, rows, words={"stages"}, what="devices")


def _numbers(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))


def holder_table(plan: Plan, rank: int, most: int) -> Table:
    """What is in the memory of a device at its peak, the largest first, and what it needs besides;
    the last row is the sum of all."""
    held, needed = plan.prediction.memory[rank], plan.prediction.device_bytes[rank]
    several = len(held.stages) > 1

    def row(
        size: int, what: str, count: str = "", stage: int = -1, category: str = "", op: str = ""
    ) -> dict[str, str]:
        module, source = _origin(plan, op)
        number = {"stage": str(stage) if stage >= 0 else ""}
        return {
            "bytes": format_bytes(size),
            "share": format_share(size / needed),
            "what": what,
            "how many": count,
            **(number if several else {}),
            "for": category,
            "module": module,
            "line": short_source(source) if source else "",
        }

    rows = []
    for h in held.holders[:most]:
        rows.append(row(h.bytes, _what(plan, h), str(h.count), h.stage, h.category.value, h.op))
        if h.modules > 1:
            rows[-1]["module"] = _NUMBERS.sub("*", rows[-1]["module"])
            rows[-1]["how many"] += f" in {h.modules} modules"
    rest = held.peak - sum(holder.bytes for holder in held.holders[:most])
    if rest > 0:
        rows.append(row(rest, f"smaller ones (--top {most + 1} shows more)"))
    rows += [row(size, what) for what, size in beyond_tensors(plan, rank).items() if size]
    rows.append(row(needed, f"all, of {format_bytes(plan.devices[rank].memory)}"))
    noun = f"stage{'s' if several else ''} {_numbers(held.stages)}"
    moment = "the optimizer steps" if held.action == "update" else f"{held.action} runs"
    title = (
        f"what holds the peak of device {rank} ({noun}), {format_bytes(held.peak)} while {moment}"
    )
    return table_of(title, rows, words={"what", "for", "module", "line"}, what="storages")


def beyond_tensors(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that a device needs beside tensors and workspaces, by what they are for."""
    held, device = plan.prediction.memory[rank], plan.devices[rank]
    beyond = plan.prediction.device_bytes[rank] - held.peak
    if not beyond:
        return {}
    allocator = max(0, held.reserved - held.peak)
    if plan.process is not None:
        return {
            "copies that a convolution makes": allocator,
            f"a margin of {format_share(MARGIN)}": beyond - allocator - device.kept_free,
            "Python and torch, before there is a model": device.kept_free,
        }
    return {
        "kept by PyTorch's allocator (reserved - allocated)": allocator,
        f"a margin of {format_share(MARGIN)}": beyond - allocator - device.kept_free,
        "kept free for CUDA's context and NCCL's buffers": device.kept_free,
    }


def _origin(plan: Plan, op: str) -> tuple[str, str]:
    """The module of an op, by its path and what is called, and its `file:line`; "" for what is
    unknown."""
    note = plan.note_of.get(op)
    if note is None:
        return "", ""
    label = note.label.removeprefix("<built-in function ").removesuffix(">")
    return f"{short_path(note.module)} {label}".strip(), note.source


_NUMBERS = re.compile(r"\d+")


def _what(plan: Plan, holder: PeakHolder) -> str:
    """What a holder is; of a value that stages hand on, with its type."""
    note = plan.note_of.get(holder.op)
    if note is None:
        return holder.what
    types = dict(zip(note.outputs, note.types, strict=True))
    described = types.get(holder.what.removeprefix("gradient of "), "")
    return f"{holder.what}, {described}" if described else holder.what


def remedy_table(plan: Plan) -> Table:
    """One row for every other setting, what saves most on the fullest device first."""
    assert plan.what_if is not None
    now = plan.prediction.device_bytes
    devices = range(len(now)) if len(now) <= _MOST_COLUMNS else ()

    def row(setting: str, sizes: Sequence[int], step_s: float) -> dict[str, str]:
        return {
            "setting": setting,
            "peak": format_bytes(max(sizes)),
            "saves": "" if sizes is now else _saved(max(now) - max(sizes)),
            "step": format_seconds(step_s),
            **{f"device {rank}": format_bytes(sizes[rank]) for rank in devices},
        }

    remedies = sorted(plan.what_if.remedies, key=lambda remedy: max(remedy.device_bytes))
    rows = [
        row("as it is", now, plan.prediction.step_s),
        *(row(remedy.change, remedy.device_bytes, remedy.step_s) for remedy in remedies),
    ]
    title = "what other settings come to, with the same stages (peak of the fullest device)"
    return table_of(title, rows, words={"setting"}, what="settings")


def _saved(size: int) -> str:
    if size == 0:
        return "nothing"
    return format_bytes(size) if size > 0 else f"{format_bytes(-size)} more"


def memory_document(plan: Plan, device: int | None = None) -> dict[str, Any]:
    """The same as values of JSON, with source lines."""
    check_memory(plan, device)
    devices = range(len(plan.prediction.memory)) if device is None else (device,)
    remedies = [] if plan.what_if is None else to_fields(plan.what_if.remedies)
    largest = max(plan.prediction.device_bytes)
    return {
        "name": plan.name,
        "schedule": plan.schedule.value,
        "microbatches": plan.microbatches,
        "step_s": plan.prediction.step_s,
        "devices": [_device_fields(plan, rank) for rank in devices],
        "frontiers": [to_fields(stage.frontier) for stage in plan.stages],
        "remedies": [
            remedy | {"saves": largest - max(remedy["device_bytes"])} for remedy in remedies
        ],
    }


def _device_fields(plan: Plan, rank: int) -> dict[str, Any]:
    held = plan.prediction.memory[rank]
    fields = held.to_fields() | {"device": rank, "memory": plan.devices[rank].memory}
    for holder in fields["holders"]:
        note = plan.note_of.get(holder["op"])
        call, module, source = ("", "", "") if note is None else _facts(note)
        holder.update(call=call, module=module, source=source)
    fields["beyond_tensors"] = beyond_tensors(plan, rank)
    fields["needed"] = plan.prediction.device_bytes[rank]
    return fields


def _facts(note: OpNote) -> tuple[str, str, str]:
    return note.label, note.module, format_source(note.source) if note.source else ""


SHOWN = 5
"""Points of a stage's frontier that are shown: the first, the last, and some between."""


def remat_table(plan: Plan) -> Table:
    """One row for every stage: from keeping everything to the least memory."""
    title = "time against memory (peak of a stage, and what it recomputes of a mini-batch for it)"
    names = ["fastest", *([""] * (SHOWN - 2)), "least memory"]
    table = figure_table(title, ["stage", *names], words=set(names))
    rows = []
    for stage in plan.stages:
        cells = [_cell(point) for point in spread(stage.frontier)]
        rows.append((str(stage.index), *cells, *[""] * (SHOWN - len(cells))))
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
