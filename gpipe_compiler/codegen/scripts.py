"""`run.py`, `__init__.py` and the README of a package."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.layout import lay_out, name
from gpipe_compiler.codegen.stage import StageSource
from gpipe_compiler.codegen.statements import value_text
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.frontend.subject import Hooks
from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.topology import device_counts
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.runtime.train.hooks import HOOKS
from gpipe_compiler.runtime.wording import listed
from gpipe_compiler.text.escaping import code_span


def write_run(plan: Plan, hooks: Hooks | None, *, package: str) -> str:
    """The source of `run.py`.

    Args:
        package: the name under which the script imports the folder, whatever the folder is called.
    """
    offered = sorted(hooks.names) if hooks is not None and plan.training else []
    return render(
        "run.py.jinja",
        name=plan.name,
        package=package,
        training=plan.training,
        hooks=_hooks(hooks) if hooks is not None and offered else None,
        offered=listed(offered),
        command="train.command",
        weights=True,
    )


def _hooks(hooks: Hooks) -> list[str]:
    place = f"{HOOKS}/{hooks.file.name}" if hooks.file is not None else hooks.module
    return lay_out(name(quote(place)), prefix="HOOKS = ")


def write_init(plan: Plan, *, weights: bool) -> str:
    """The source of `__init__.py`, with the Pipeline of the package."""
    return render(
        "init.py.jinja",
        name=plan.name,
        stages=len(plan.stages),
        training=plan.training,
        weights=weights,
    )


def write_readme(
    plan: Plan,
    graph: Graph,
    stages: Sequence[StageSource],
    *,
    package: str,
    weights: bool,
    folder: str = "",
) -> str:
    """What the package is, how to run it, what each stage holds.

    Args:
        package: a name under which it can be imported.
        folder: of Hugging Face's, where the weights are in such; "" otherwise.
    """
    return render(
        "readme.md.jinja",
        name=plan.name,
        package=package,
        training=plan.training,
        loss_weight=plan.training
        and graph.loss is not None
        and any(term.weight is not None for term in graph.loss.summands),
        weights=weights,
        folder=folder,
        schedule=plan.schedule.value,
        microbatches=plan.microbatches,
        microbatch_size=plan.microbatch_size,
        batch_size=plan.batch_size,
        manner=_manner(plan),
        parameters=f"{graph.parameter_count:,}",
        stages=[_stage_row(graph, stage) for stage in stages],
        count=len(stages),
        devices=len(plan.orders),
        replicas=plan.replicas,
        processes=device_counts(len(stages), plan.schedule),
        inputs=[f"`{source.name}`: {value_text(graph, source.name)}" for source in graph.inputs],
        own_classes=bool(graph.classes),
    )


def _manner(plan: Plan) -> str:
    """How the stages compute, as planned, in words."""
    parts = []
    for kind in (Remat.FULL, Remat.SEGMENTS):
        again = [str(stage.index) for stage in plan.stages if stage.remat is kind]
        word = "full" if kind is Remat.FULL else "of segments"
        if len(again) == len(plan.stages):
            parts.append(word)
        elif again:
            parts.append(f"{word} on stage{'s' if len(again) > 1 else ''} {', '.join(again)}")
    remat = " and ".join(parts) or "none"
    words = f"remat {remat}, BatchNorm {plan.batchnorm.value}, precision {plan.precision.value}"
    asked = " ".join(plan.constraints.words)
    return f"{words}; the stages were cut with {code_span(asked)}" if asked else words


def _stage_row(graph: Graph, stage: StageSource) -> str:
    parameters = sum(
        state.bytes // state.dtype.itemsize
        for name in dict.fromkeys(stage.state.values())
        if (state := graph.state[name]).kind is StateKind.PARAMETER
    )
    return (
        f"| [{stage.index}](stage_{stage.index}.py) | {parameters:,} "
        f"| {values_cell(stage.inputs)} | {values_cell(stage.outputs)} |"
    )


def values_cell(names: Sequence[str]) -> str:
    """The names of values in a table of stages."""
    return ", ".join(code_span(name) for name in names) or "none"
