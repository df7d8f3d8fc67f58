"""Shows plans of graphs from elsewhere."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from gpipe_compiler.graph_json.plan import BarePlan
from gpipe_compiler.report.terminal import cell, figure_table, pairs_table
from gpipe_compiler.runtime.wording import counted, printable
from gpipe_compiler.text.units import format_bytes, format_seconds, proof

_NAMES = 4
"""Ops of a stage that its row names."""


def show_bare_plan(plan: BarePlan) -> RenderableType:
    manner = plan.schedule.value if plan.schedule else "inference"
    headline = Text.assemble(
        (printable(plan.graph), "bold"),
        f" in {counted(len(plan.stages), 'stage')}: {manner}, "
        f"{counted(plan.microbatches, 'micro-batch', 'es')}, "
        f"shortest {plan.objective.value}",
    )
    back = plan.schedule is not None
    columns = ["stage", "device", "ops", "names", "forward", *(["backward"] if back else [])]
    columns += ["transfers", "all", "receives", "sends", "parameters"]
    table = figure_table("stages (times and bytes of one micro-batch)", columns, words={"names"})
    for index, stage in enumerate(plan.figures):
        cells = (
            str(index),
            str(stage.device),
            f"{len(stage.ops):,}",
            _names(stage.ops),
            format_seconds(stage.forward_s),
            *([format_seconds(stage.backward_s)] if back else []),
            format_seconds(stage.transfer_s),
            format_seconds(stage.total_s),
            format_bytes(stage.receive_bytes),
            format_bytes(stage.send_bytes),
            format_bytes(stage.parameter_bytes),
        )
        table.add_row(*map(cell, cells))
    known = proof(plan.value_s, plan.lower_bound_s, proved=plan.proved)
    rows = [
        ("step", format_seconds(plan.step_time_s)),
        ("longest stage", f"{format_seconds(plan.bottleneck_s)} a micro-batch, with its transfers"),
        ("lower bound", f"{format_seconds(plan.lower_bound_s)} ({known})"),
        ("peak memory", format_bytes(max(plan.device_bytes, default=0))),
        ("planned in", format_seconds(plan.seconds)),
    ]
    return Group(headline, table, pairs_table("prediction", rows))


def _names(ops: tuple[str, ...]) -> str:
    if len(ops) <= _NAMES:
        return ", ".join(ops)
    return f"{', '.join(ops[: _NAMES - 2])} ... {ops[-1]}"
