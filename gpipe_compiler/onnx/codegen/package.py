"""Writes a package of ONNX stages."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import gpipe_compiler.onnx.runtime
import gpipe_compiler.runtime
from gpipe_compiler.codegen.package import PLAN, Progress, copy_runtime
from gpipe_compiler.onnx.codegen.exported import export_stages
from gpipe_compiler.onnx.codegen.scripts import (
    Traits,
    closeness,
    write_onnx_init,
    write_onnx_readme,
    write_onnx_run,
    write_onnx_schedule,
)
from gpipe_compiler.onnx.codegen.staged import write_staged
from gpipe_compiler.onnx.codegen.stages import stage_file, write_stages
from gpipe_compiler.onnx.frontend.nodes import is_quantised
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.frontend.sizes import InputSizes
from gpipe_compiler.onnx.runtime.stage import write_checksums
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.html import write_report

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
    _write_program(plan, folder, Traits(close, sizes.fixed, sizes.free, sizes.integers, state))


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
