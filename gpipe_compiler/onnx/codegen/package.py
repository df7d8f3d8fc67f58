"""Writes a package of ONNX stages."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import gpipe_compiler.onnx.runtime
import gpipe_compiler.runtime
from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.expressions import RawText
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.names import identifier
from gpipe_compiler.codegen.package import PLAN, Progress, copy_runtime
from gpipe_compiler.codegen.records import RecordWriter
from gpipe_compiler.codegen.schedule import sample_limits, schedule_text, where
from gpipe_compiler.codegen.scripts import values_cell
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.ir import Graph, Input, Value
from gpipe_compiler.onnx.codegen.exported import export_stages
from gpipe_compiler.onnx.codegen.stages import stage_file, staged_file, write_staged, write_stages
from gpipe_compiler.onnx.frontend.nodes import is_quantised, other_type
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.frontend.sizes import InputSizes, array_name
from gpipe_compiler.onnx.runtime.arrays import foreign
from gpipe_compiler.onnx.runtime.check import Closeness
from gpipe_compiler.onnx.runtime.spec import (
    ArrayInput,
    ArrayOutput,
    OnnxPipelineSpec,
    OnnxStageSpec,
)
from gpipe_compiler.onnx.runtime.stage import write_checksums
from gpipe_compiler.passes.batch_rules import other_alone
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.report.html import write_report
from gpipe_compiler.text.escaping import code_span

_SHARED = (
    "__init__.py",
    "errors.py",
    "limits.py",
    "wording.py",
    "core/__init__.py",
    "core/typed.py",
)
"""What a package of ONNX stages needs of the runtime of torch stages; none of it imports torch."""


def write_onnx(
    plan: Plan,
    model: OnnxModel,
    sizes: InputSizes,
    state: Mapping[str, str],
    folder: Path,
    progress: Progress,
) -> None:
    """Writes the files of a package of an ONNX model into an empty folder.

    Args:
        state: inputs that a session holds between calls, each with the output that it becomes.

    Raises:
        EmitError: when onnx.checker refuses a stage.
    """
    progress("writing the stages")
    write_stages(plan, model, folder, free=any(sizes.free.values()))
    close = closeness(plan.known_graph, quantised=is_quantised(plan.known_graph))
    traits = Traits(close, sizes.fixed, sizes.free, sizes.integers, state, sizes.words)
    _write_program(plan, folder, traits)


def write_exported(plan: Plan, folder: Path, progress: Progress) -> None:
    """The same of a torch model, each stage exported by torch.onnx.

    Raises:
        EmitError: when a stage cannot be exported.
    """
    export_stages(plan, folder, progress)
    _write_program(plan, folder, Traits(closeness(plan.known_graph, quantised=False)))


def _write_program(plan: Plan, folder: Path, traits: Traits) -> None:
    """All of a package but the models of its stages."""
    write_checksums(folder, [stage_file(stage) for stage in plan.stages])
    write_staged(plan, folder)
    texts = {
        "schedule.py": write_onnx_schedule(plan, traits),
        "__init__.py": write_onnx_init(plan),
        "run.py": write_onnx_run(plan),
        "README.md": write_onnx_readme(plan),
        PLAN: plan.to_json(),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    for file in _SHARED:
        (folder / "runtime" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(gpipe_compiler.runtime.__path__[0], file), folder / "runtime" / file)
    copy_runtime(gpipe_compiler.onnx.runtime, folder / "runtime" / "onnx")
    write_report(plan, folder / "report.html")


# --- its Python and its README --------------------------------------------------------------------


QUANTISED = 2e-2
"""How close outputs are where numbers are rounded to integers."""

_STEPS = 4
"""Last places by which outputs of floats of 16 bits may differ."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts of a model that its plan does not have.

    Attributes:
        fixed: whether the model takes batches of one size only.
        free: the dimensions of each input that may be of any size, without the batch.
        integers: by input, those that random numbers may be, where that is known.
        state: inputs that a session holds between calls, each with the output that it becomes.
        words: strings that the model knows.
    """

    close: Closeness
    fixed: bool = False
    free: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    integers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def closeness(graph: Graph, *, quantised: bool) -> Closeness:
    """The tolerance for the outputs of stages, against those of the whole model.

    ONNX Runtime computes floats of 16 bits in 32 where it has no kernel for them, and rounds where
    stages end: there, last places differ.
    """
    kinds = {
        name: kind
        for name in graph.output_values
        if foreign(kind := str(graph.values[name].dtype).removeprefix("torch."))
    }
    if quantised:
        return Closeness(QUANTISED, quantised=True, kinds=kinds)
    known = {value.dtype for value in graph.values.values()}
    known.update(state.dtype for state in graph.state.values())
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in known:
            return Closeness(_STEPS * torch.finfo(dtype).eps, kinds=kinds)
    return Closeness(kinds=kinds)


def write_onnx_schedule(plan: Plan, traits: Traits) -> str:
    """The source of `schedule.py`."""
    graph, records = plan.known_graph, RecordWriter(Imports(), ".runtime.onnx.spec")
    values = {
        "name": plan.name,
        "stages": tuple(OnnxStageSpec(stage_file(s), s.inputs, s.outputs) for s in plan.stages),
        "inputs": tuple(_input(source, traits) for source in graph.inputs),
        "outputs": tuple(_output(graph.values[item], traits) for item in graph.output_values),
        "placement": plan.placement or tuple(range(len(plan.stages))),
        "devices": runtime_devices(plan),
        "orders": RawText("ORDERS"),
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "fixed": traits.fixed,
        "quantised": traits.close.quantised,
        "whole_batch": graph.whole_batch,
        "alone": "" if (found := other_alone(graph)) is None else where(found),
        "limits": tuple(sample_limits(graph)),
        "state": tuple(traits.state.items()),
        "tolerance": float(f"{traits.close.tolerance:.3g}"),
    }
    spec = records.record(OnnxPipelineSpec, values)
    return schedule_text(plan, spec, records.imports, kind="forward only")


def runtime_devices(plan: Plan) -> tuple[str, ...]:
    """The devices of a plan as ONNX Runtime has them: `cpu`, `cuda:0`."""
    return tuple(
        "cpu" if _is_processor(device.name) else f"cuda:{number}"
        for number, device in enumerate(plan.devices)
    )


def _is_processor(name_: str) -> bool:
    return name_.endswith(" host") or "CPU" in name_


def _input(source: Input, traits: Traits) -> ArrayInput:
    free = traits.free.get(source.name, ())
    sizes: list[int | None] = [*(source.example_shape or ())]
    if source.batch_dim is not None and not traits.fixed:
        sizes[source.batch_dim] = None
    integers = traits.integers.get(source.name, (0, 2))
    kind, words = array_name(source.dtype), traits.words if source.dtype is None else ()
    return ArrayInput(source.name, kind, tuple(sizes), source.batch_dim, free, integers, words)


def _output(value: Value, traits: Traits) -> ArrayOutput:
    return ArrayOutput(value.name, value.batch_dim, traits.close.kinds.get(value.name, ""))


def write_onnx_init(plan: Plan) -> str:
    """The source of `__init__.py`, with the Pipeline of the package."""
    return render("onnx_init.py.jinja", name=plan.name, stages=len(plan.stages))


def write_onnx_run(plan: Plan) -> str:
    """The source of `run.py`."""
    package = identifier(f"{plan.name}_x{len(plan.stages)}")
    return render(
        "run.py.jinja",
        name=plan.name,
        package=package,
        training=False,
        hooks=None,
        offered="",
        command="onnx.command",
        weights=False,
    )


def write_onnx_readme(plan: Plan) -> str:
    """What the package is, how to run it, what each stage holds."""
    graph = plan.known_graph
    return render(
        "onnx_readme.md.jinja",
        name=plan.name,
        package=identifier(f"{plan.name}_x{len(plan.stages)}"),
        parameters=f"{graph.parameter_count:,}",
        count=len(plan.stages),
        devices=len(plan.orders),
        example=", ".join(f"{quote(item.name)}: {identifier(item.name)}" for item in graph.inputs),
        inputs=[_described(graph, item.name) for item in graph.inputs],
        outputs=[_described(graph, item) for item in graph.output_values],
        stages=[_row(graph, stage) for stage in plan.stages],
        microbatches=plan.microbatches,
        microbatch_size=plan.microbatch_size,
        staged=staged_file(plan),
    )


def _described(graph: Graph, value_name: str) -> str:
    value = graph.values[value_name]
    sizes = list(map(str, value.shape))
    if value.batch_dim is not None:
        times = value.shape[value.batch_dim] / graph.batch_size
        sizes[value.batch_dim] = "B" if times == 1 else f"{times:g}B"
    other = other_type(graph, value_name)
    kind = array_name(value.dtype) if other is None else _OTHERS[other.WhichOneof("value")]
    return f"{code_span(value_name)}: {' x '.join(sizes) or 'a number'}, {kind}"


_OTHERS = {"tensor_type": "strings", "sequence_type": "a list", "optional_type": "or None"}


def _row(graph: Graph, stage: Stage) -> str:
    numbers = sum(math.prod(graph.state[item].shape) for item in stage.state)
    return (
        f"| [{stage.index}]({stage_file(stage)}) | {len(stage.ops)} | {numbers:,} "
        f"| {values_cell(stage.inputs)} | {values_cell(stage.outputs)} |"
    )
