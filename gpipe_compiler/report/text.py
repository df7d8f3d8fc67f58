"""Plans as plain text."""

from __future__ import annotations

from gpipe_compiler.plan import Plan


def format_plan(plan: Plan) -> str:
    """A plan in a few lines: one per stage, then what to expect."""
    lines = [f"{plan.name}: {len(plan.stages)} stages, {plan.microbatches} micro-batches"]
    lines.extend(
        f"  stage {stage.index}: {len(stage.ops)} ops, {stage.parameter_count:,} parameters"
        for stage in plan.stages
    )
    return "\n".join(lines)
