"""Draws overview.svg, the picture of the README: a model, its stages, and one step of them.

    gpipe-compile examples/resnet50.py --stages 4 --microbatches 4 --devices 4xV100 \\
        --dry-run --json > plan.json
    python docs/draw_overview.py plan.json docs/overview.svg

Everything in it is read from the plan. Every block of the model has the colour of its stage, and is
divided where a stage ends within it; every bar of the step is as long as the plan predicts.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.plan.plan import timeline
from gpipe_compiler.report.gantt import LEFT, WIDTH, gantt
from gpipe_compiler.text.units import format_bytes, format_seconds

COLOURS = ("#3f6fb0", "#2f8f83", "#c07a2c", "#8a5a9e", "#b0484f", "#5d7a35")
STYLE = (
    "text { font: 12px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1b2430 }"
    " .soft { fill: #5b6775; font-size: 11px } .in { fill: #ffffff; text-anchor: middle }"
    " .backward, .update { opacity: 0.62 } .transfer { opacity: 0.35 }"
    " .tiny { font-size: 7.6px } .row { fill: #f3f5f8 } .line { stroke: #d5dbe2 }"
    " .edge { stroke: #9aa5b1; fill: none }"
)
MODEL_Y, STAGE_Y, STEP_Y = 36, 96, 176
GAP = 22


def colour(stage: int) -> str:
    """The colour of a stage."""
    return COLOURS[stage % len(COLOURS)]


def blocks(plan: Plan, stage: Stage) -> list[str]:
    """The modules of a stage in order: `conv1`, `layer1.0`, `layer1.1`, ..."""
    notes = {note.name: note for note in plan.noted}
    paths = (notes[op].module.split(".") for op in stage.ops)
    names = (".".join(path[: 2 if path[1:] and path[1].isdigit() else 1]) for path in paths)
    return [name for name, _ in itertools.groupby(filter(None, names))]


def draw(plan: Plan) -> str:
    """The picture as SVG."""
    steps = gantt(timeline(plan))
    height = STEP_Y + steps.height + 8
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" '
            f'width="{WIDTH:.0f}" height="{height:.0f}">',
            f"<title>{escape(plan.name)}: {len(plan.stages)} stages, and one training step</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH:.0f}" height="{height:.0f}" style="fill: #ffffff"/>',
            *_model_and_stages(plan),
            *_step(plan),
            "</svg>\n",
        )
    )


def _model_and_stages(plan: Plan) -> Iterator[str]:
    held = [blocks(plan, stage) for stage in plan.stages]
    width = (WIDTH - GAP * (len(held) - 1)) / sum(map(len, held))
    device = plan.cluster.devices[0].name
    for y, title in (
        (14, f"modules of {plan.name}, in the colour of their stage"),
        (STAGE_Y - 10, "stages: parameters, forward time"),
        (STEP_Y - 8, f"a step of {plan.microbatches} micro-batches as predicted for {device}s: "),
    ):
        yield f'<text class="soft" x="0" y="{y}">{escape(title)}'
        yield "forward dark, backward light, U the optimizer</text>" if y > STAGE_Y else "</text>"
    x = 0.0
    for stage, names in zip(plan.stages, held, strict=True):
        fill = f'style="fill: {colour(stage.index)}"'
        span = width * len(names)
        for place, name in enumerate(names):
            left = x + place * width
            yield f"<g><title>{escape(name)}</title>"
            yield f'<rect {fill} x="{left:.1f}" y="{MODEL_Y - 12}" width="{width - 2:.1f}" '
            yield 'height="24" rx="3"/>'
            yield f'<text class="in tiny" x="{left + width / 2 - 1:.1f}" y="{MODEL_Y + 3}">'
            yield f"{escape(name)}</text></g>"
        yield f'<rect {fill} x="{x:.1f}" y="{STAGE_Y}" width="{span - 2:.1f}" height="42" rx="5"/>'
        middle = x + span / 2
        yield f'<text class="in" x="{middle:.1f}" y="{STAGE_Y + 17}">stage_{stage.index}.py</text>'
        figures = f"{stage.parameter_count / 1e6:.1f}M, {format_seconds(stage.forward_s)}"
        yield f'<text class="in" x="{middle:.1f}" y="{STAGE_Y + 33}">{figures}</text>'
        if stage.index:
            sent = format_bytes(stage.receive_bytes)
            yield f'<text class="soft" x="{x - GAP / 2:.1f}" y="{STAGE_Y - 10}" '
            yield f'style="text-anchor: middle">{sent}</text>'
            yield f'<path class="edge" d="M {x - GAP + 1:.1f} {STAGE_Y + 21} h {GAP - 4}"/>'
        x += span + GAP


def _step(plan: Plan) -> Iterator[str]:
    simulation = timeline(plan)
    steps = gantt(simulation)
    yield f'<g transform="translate(0 {STEP_Y})">'
    for label, y in steps.rows:
        yield f'<rect class="row" x="{LEFT}" y="{y - 12}" width="{WIDTH - LEFT}" height="24"/>'
        yield f'<text class="soft" x="0" y="{y + 4}">{label}</text>'
    for label, x in steps.ticks:
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{steps.height:.0f}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="12" style="text-anchor: middle">{label}</text>'
    for bar, span in zip(steps.bars, simulation.timeline, strict=True):
        yield f"<g><title>{escape(bar.tip)}</title>"
        yield (
            f'<rect class="{bar.kind}" style="fill: {colour(span.action.stage)}" x="{bar.x:.1f}" '
            f'y="{bar.y:.0f}" width="{max(bar.width - 0.6, 0.8):.1f}" height="{bar.height:.0f}"/>'
        )
        if bar.text:
            middle = bar.x + bar.width / 2
            yield f'<text class="in" x="{middle:.1f}" y="{bar.y + 16:.0f}">{bar.text}</text>'
        yield "</g>"
    yield "</g>"


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(draw(Plan.from_json(json.dumps(read["plan"]))), encoding="utf-8")
