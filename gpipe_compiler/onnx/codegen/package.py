"""Writes a package of ONNX stages."""

from __future__ import annotations

from pathlib import Path

import gpipe_compiler.onnx.runtime
from gpipe_compiler.codegen.package import PLAN, Progress, copy_runtime
from gpipe_compiler.onnx.codegen.exported import export_stages
from gpipe_compiler.onnx.codegen.scripts import (
    write_onnx_init,
    write_onnx_readme,
    write_onnx_run,
    write_onnx_schedule,
)
from gpipe_compiler.onnx.codegen.staged import write_staged
from gpipe_compiler.onnx.codegen.stages import write_stages
from gpipe_compiler.onnx.codegen.traits import Traits, closeness
from gpipe_compiler.onnx.codegen.whole import write_whole
from gpipe_compiler.onnx.frontend.constants import is_quantised
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.frontend.sizes import InputSizes
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.html import write_report


def write_onnx(
    plan: Plan, model: OnnxModel, sizes: InputSizes, folder: Path, progress: Progress
) -> None:
    """Writes the files of a package of an ONNX model into an empty folder.

    Raises:
        EmitError: when onnx.checker refuses a stage.
    """
    progress("writing the stages")
    places = write_stages(plan, model, folder)
    write_staged(plan, model, folder, places)
    assert plan.graph is not None
    close = closeness(plan.graph, quantised=is_quantised(plan.graph))
    _write_program(plan, folder, Traits(close, sizes.fixed, sizes.free))


def write_exported(plan: Plan, folder: Path, progress: Progress) -> None:
    """The same of a torch model, each stage exported by torch.onnx.

    Raises:
        EmitError: when a stage cannot be exported.
    """
    export_stages(plan, folder, progress)
    write_whole(plan, folder)
    assert plan.graph is not None
    _write_program(plan, folder, Traits(closeness(plan.graph, quantised=False)))


def _write_program(plan: Plan, folder: Path, traits: Traits) -> None:
    """All of a package but its models."""
    texts = {
        "schedule.py": write_onnx_schedule(plan, traits),
        "__init__.py": write_onnx_init(plan),
        "run.py": write_onnx_run(plan),
        "README.md": write_onnx_readme(plan),
        PLAN: plan.to_json(),
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    copy_runtime(gpipe_compiler.onnx.runtime, folder / "runtime")
    write_report(plan, folder / "report.html")
