"""Plans as tables on a terminal and as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table

from gpipe_compiler.cluster import is_here, is_host
from gpipe_compiler.cluster.machines import MARGIN
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.plan.memory_curve import CATEGORIES
from gpipe_compiler.report.comparisons import first_question, show_frontier
from gpipe_compiler.report.facts import (
    BETWEEN,
    Boundary,
    boundaries,
    boundary_bytes,
    device_bytes,
    headline,
    modules_of,
    parameter_count,
    placed,
)
from gpipe_compiler.report.memory_tables import remat_table
from gpipe_compiler.report.terminal import pairs_table, table_of
from gpipe_compiler.runtime.spec import Remat, WeightSharding
from gpipe_compiler.runtime.train.comparison import Row
from gpipe_compiler.runtime.wording import counted, printable
from gpipe_compiler.text.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_type,
    proof,
    short_path,
    short_source,
)

_MOST_OPENED = 4
"""Modules that are named where stages end inside them."""

_MOST_LISTED = 16
"""Numbers of stages or devices that are all listed."""

_LONGEST_STRETCH = 36
"""Columns up to which the first and last module of a stage stand on one line."""

_PLAIN_WIDTH = 200
"""Columns of plain text; wide, so that no cell of a table wraps."""


def format_plan(plan: Plan) -> str:
    """A plan as plain text: its stages, what crosses between them, what to expect."""
    return plain_text(show_plan(plan))


def plain_text(shown: RenderableType) -> str:
    """What rich would print, without colour and without trailing blanks."""
    console = Console(file=io.StringIO(), width=_PLAIN_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def show_plan(plan: Plan) -> RenderableType:
    parts: list[RenderableType] = [headline(plan), first_question(plan), stage_table(plan)]
    if plan.crossings:
        parts.append(boundary_table(plan))
    if any(stage.remat is not Remat.NONE for stage in plan.stages):
        parts.append(remat_table(plan))
    parts.append(prediction_table(plan))
    if plan.frontier is not None:
        parts.append(show_frontier(plan.frontier))
    return Group(*parts)


def stage_table(plan: Plan) -> Table:
    once = "updates once a step, " if _updates(plan) else ""
    title = f"stages (times and bytes of one micro-batch, {once}memory at its peak)"
    return table_of(title, stage_rows(plan), words={"holds"}, what="stages")


def _updates(plan: Plan) -> bool:
    return any(stage.update_s > 0 for stage in plan.stages)


def stage_rows(plan: Plan) -> list[dict[str, str]]:
    """One row for every stage: its modules, and its cost for one micro-batch."""
    recomputes = any(stage.remat is not Remat.NONE for stage in plan.stages)
    updates = _updates(plan)
    ranks = placed(plan)

    def row(stage: Stage) -> dict[str, str]:
        cells = {"stage": str(stage.index)}
        if ranks:
            cells["device"] = ranks[stage.index]
        cells["holds"] = _stretch(plan, stage)
        cells["ops"] = _ops(len(stage.ops), len(stage.duplicates))
        cells["parameters"] = f"{stage.parameter_count:,}"
        cells["forward"] = format_seconds(stage.forward_s)
        if plan.training:
            cells["backward"] = format_seconds(stage.backward_s)
        if updates:
            cells["update"] = format_seconds(stage.update_s)
        cells["receives"] = format_bytes(stage.receive_bytes)
        if plan.training:
            cells["saved"] = format_bytes(stage.saved_bytes)
        if recomputes:
            cells["remat"] = stage.remat.value
        return cells | {"peak": format_bytes(plan.prediction.peak_bytes[stage.index])}

    return list(map(row, plan.stages))


def _stretch(plan: Plan, stage: Stage) -> str:
    """The modules of a stage, on two lines where they are long."""
    ends = [short_path(name) for name in modules_of(plan, stage).split(BETWEEN)]
    line = BETWEEN.join(ends)
    return line if len(line) <= _LONGEST_STRETCH else f"{ends[0]} …\n{ends[-1]}"


def _ops(count: int, duplicates: int) -> str:
    return f"{count} ({duplicates} again)" if duplicates else str(count)


def boundary_table(plan: Plan) -> Table:
    words = {"value", "made by", "line"}
    title = "boundaries (of one micro-batch)"
    return table_of(title, boundary_rows(plan), words, what="boundary values")


def boundary_rows(plan: Plan) -> list[dict[str, str]]:
    def row(boundary: Boundary) -> dict[str, str]:
        crossing = boundary.crossing
        cells = {
            "value": crossing.value,
            "stages": f"{crossing.source} → {_several(crossing.targets)}",
            "type": format_type(crossing.example_shape, crossing.dtype),
            "bytes": format_bytes(boundary.bytes),
        }
        if plan.training:
            cells["gradient"] = "yes" if crossing.gradient else "no"
        source = short_source(boundary.source) if boundary.source else ""
        return cells | {"made by": boundary.label, "line": source}

    return list(map(row, boundaries(plan)))


def _several(numbers: Sequence[int]) -> str:
    """Numbers of stages or devices; of very many, the first and the last."""
    if len(numbers) <= _MOST_LISTED:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]} … {numbers[-1]} ({len(numbers)} in all)"


def prediction_table(plan: Plan) -> Table:
    return pairs_table(
        "prediction", [*constraint_rows(plan), *prediction_rows(plan), *_peak_rows(plan)]
    )


def prediction_rows(plan: Plan) -> list[tuple[str, str]]:
    """What to expect of a step, in pairs of what and how much."""
    prediction = plan.prediction
    known = proof(prediction.objective_s, prediction.lower_bound_s, proved=prediction.proved)
    rows = _step_rows(plan)
    timed = {"in threads": prediction.threads_s, "under torchrun": prediction.torchrun_s}
    if any(timed.values()):
        figures = ", ".join(f"{format_seconds(s)} {where}" for where, s in timed.items() if s)
        rows.append(("measured here", f"{figures}, without the optimizer"))
    rows.append(("busiest device", f"{format_seconds(prediction.bottleneck_s)} a micro-batch"))
    bound = format_seconds(prediction.lower_bound_s)
    if prediction.longest_s is not None:
        longest = format_seconds(prediction.longest_s)
        rows.append(("longest stage", f"{longest} a micro-batch, with its transfers"))
        bound += " of the longest stage"
    rows.append(("lower bound", f"{bound} ({known})"))
    rows += _inside_rows(plan)
    rows.append(("bubble", format_share(prediction.bubble)))
    if plan.tied:
        rows.append(("tied together", plan.tied))
    if prediction.recompute > 0:
        rows.append(("recomputing", f"{format_share(prediction.recompute)} of the devices' time"))
    if prediction.shared_sum_s > 0:
        shared = format_seconds(prediction.shared_sum_s)
        rows.append(("tied weights", f"{shared} to sum their gradients"))
    both_ways = ", gradients included" if plan.training else ""
    crossing = format_bytes(boundary_bytes(plan))
    rows.append(("boundaries", f"{crossing} a micro-batch{both_ways}"))
    rows += _sharding_rows(plan)
    rows.append(("peak memory", _memory(plan)))
    rows += _process_rows(plan) or _gpu_rows(plan)
    if plan.sizes:
        told = ", ".join(f"{printable(name)} (here {size})" for name, size in plan.sizes)
        rows.append(("free sizes", told))
    if plan.optimizer:
        rows.append(("optimizer", plan.optimizer))
    return [*rows, ("op times", plan.cost_source)]


def _process_rows(plan: Plan) -> list[tuple[str, str]]:
    """What the largest process of a host takes."""
    if plan.process is None:
        bare = any(is_host(each) and is_here(each) and not each.kept_free for each in plan.devices)
        return [("a process", "not counted: memory is that of tensors alone")] if bare else []
    base, tensors = plan.process.base, max(plan.process.tensors)
    words = f"{format_bytes(base + tensors)} at most: {format_bytes(base)} before it holds a model"
    if not plan.process.keeps_freed:
        words += "; freed memory is given back at once, which is slower"
    return [("a process", words)]


def _gpu_rows(plan: Plan) -> list[tuple[str, str]]:
    """What the fullest GPU needs its memory for."""
    memory = plan.prediction.memory
    fullest = max(range(len(memory)), key=lambda rank: memory[rank].reserved, default=0)
    if not memory or not memory[fullest].reserved:
        return []
    held, device = memory[fullest], plan.devices[fullest]
    words = f"{format_bytes(held.peak)} of tensors, {format_bytes(held.reserved)} reserved for them"
    if device.kept_free:
        words += f"; a margin of {format_share(MARGIN)}, and {format_bytes(device.kept_free)} kept "
        words += "free for CUDA and NCCL"
    return [("on the GPU", words)]


def _step_rows(plan: Plan) -> list[tuple[str, str]]:
    """How long a step is here, and how long it would be where no devices share a place."""
    work = "training step" if plan.training else "mini-batch"
    step_s = plan.prediction.step_s
    if plan.here_s == step_s:
        return [(work, _pace(plan, step_s))]
    devices = len(plan.orders) * plan.replicas
    shared = f"this machine runs {plan.cluster.places} of {devices} devices at a time"
    return [
        (work, f"{_pace(plan, plan.here_s)}: {shared}"),
        (f"on {devices} devices", _pace(plan, step_s)),
    ]


def _pace(plan: Plan, step_s: float) -> str:
    rate = plan.batch_size / step_s if step_s > 0 else 0.0
    return f"{format_seconds(step_s)} ({format_rate(rate)} samples/s)"


def _sharding_rows(plan: Plan) -> list[tuple[str, str]]:
    """What replicas divide among them, and what the busiest device sends and receives for it."""
    if plan.sharding is WeightSharding.NONE:
        return []
    words = f"{plan.sharding.described} among {plan.replicas} replicas"
    if plan.graph is None:
        return [("sharded", words)]
    states, places = plan.graph.state, plan.placement or range(len(plan.stages))
    held: dict[int, set[str]] = {}
    for stage, place in zip(plan.stages, places, strict=True):
        held.setdefault(place, set()).update(n for n in stage.state if states[n].requires_grad)
    largest = max(sum(states[name].bytes for name in names) for names in held.values())
    times = 3 * plan.microbatches if plan.sharding is WeightSharding.FULL else 2
    sent = format_bytes(times * largest * (plan.replicas - 1) // plan.replicas)
    return [("sharded", f"{words}; {sent} a step from each device, at most")]


def _inside_rows(plan: Plan) -> list[tuple[str, str]]:
    """What it costs to cut as few modules as possible, and which are cut all the same."""
    best_s = plan.prediction.anywhere_s
    if best_s is None or not best_s > 0:
        return []
    longer = max(0.0, plan.prediction.objective_s / best_s - 1)
    names = ", ".join(map(printable, plan.opened[:_MOST_OPENED]))
    more = len(plan.opened) - _MOST_OPENED
    which = f"inside {names}{f' and {more} more' if more > 0 else ''}" if names else "none"
    cost = f"{format_share(longer)} above {format_seconds(best_s)} with cuts anywhere"
    return [("modules cut", f"{which} ({cost}; up to {format_share(plan.cut_inside)} is given)")]


def constraint_rows(plan: Plan) -> list[tuple[str, str]]:
    words = plan.constraints.words
    return [("as asked", ", ".join(words))] if words else []


def _peak_rows(plan: Plan) -> list[tuple[str, str]]:
    """The content of the fullest device at its peak, where that is known."""
    memory, devices = plan.prediction.memory, plan.devices
    if not memory:
        return []
    rank = max(range(len(memory)), key=lambda rank: memory[rank].peak / devices[rank].memory)
    fullest = memory[rank]
    sizes = sorted(zip(fullest.sizes, CATEGORIES, strict=True), key=lambda pair: -pair[0])
    words = [f"{category.value} {format_bytes(size)}" for size, category in sizes if size]
    return [("held then", f"{', '.join(words)}; device {rank}, {fullest.action}")]


def _memory(plan: Plan) -> str:
    """The fullest device, and which are too full."""
    sizes, devices = device_bytes(plan), plan.devices
    fullest = max(range(len(sizes)), key=lambda rank: sizes[rank] / devices[rank].memory)
    name = (
        "a device" if len(set(devices)) == 1 else f"the {devices[fullest].name} of rank {fullest}"
    )
    memory = devices[fullest].memory
    joined = "of" if len(set(devices)) == 1 else "with"
    text = f"{format_bytes(sizes[fullest])} on {name} {joined} {format_bytes(memory)}"
    over = {
        rank: size - devices[rank].memory
        for rank, size in enumerate(sizes)
        if size > devices[rank].memory
    }
    if not over:
        return text
    noun = "stage" if len(devices) == len(plan.stages) else "device"
    which = f"{noun}{'s' if len(over) > 1 else ''} {_several(tuple(over))}"
    most = " at most" if len(over) > 1 else ""
    return f"{text}: too much for {which}, by {format_bytes(max(over.values()))}{most}"


class ValidationResult(Protocol):
    """The part of a validation that is shown: a row for every kind of tensor, and notes."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """One for every kind of tensor."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences."""


def summary_table(
    plan: Plan,
    validation: ValidationResult | None,
    not_validated: str = "",
    batch: str = "",
    unread: Sequence[str] = (),
) -> Table:
    """What a compile made, in a few lines.

    Args:
        validation: None where nothing was compared.
        not_validated: why not, where the user did not say so.
        batch: what there is to know about which dimensions are the batch.
        unread: inputs on which neither outputs nor loss depend.
    """
    unvalidated = f"no: {not_validated}" if not_validated else "no"
    facts = [
        ("stages", str(len(plan.stages))),
        ("ops", str(len({name for stage in plan.stages for name in stage.ops}))),
        ("parameters", f"{parameter_count(plan):,}"),
        (
            "micro-batches",
            f"{plan.microbatches}, of {counted(plan.microbatch_size, 'sample')} each",
        ),
        *([("batch", batch)] if batch else []),
        *([("without effect", ", ".join(unread))] if unread else []),
        *constraint_rows(plan),
        *prediction_rows(plan),
        ("validated", unvalidated if validation is None else format_validation(validation)),
    ]
    return pairs_table("summary", facts)


def format_validation(validation: ValidationResult) -> str:
    """Which kinds of tensor were compared, with the largest difference of each."""
    compared = (
        f"{row.what}: {counted(row.compared, 'tensor')}, largest difference "
        f"{row.largest_difference:.2g} ({row.relative:.1g} of its size, "
        f"{row.tolerance:.0e} allowed)"
        for row in validation.rows
    )
    return "\n".join((*compared, *validation.notes))
