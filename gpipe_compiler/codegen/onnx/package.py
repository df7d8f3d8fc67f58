"""Writes a package of ONNX stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gpipe_compiler.runtime_onnx
from gpipe_compiler.codegen.onnx.scripts import (
    write_onnx_init,
    write_onnx_readme,
    write_onnx_run,
    write_onnx_schedule,
)
from gpipe_compiler.codegen.onnx.staged import write_staged
from gpipe_compiler.codegen.onnx.stages import write_stages
from gpipe_compiler.codegen.package import PLAN, Progress, copy_runtime, place
from gpipe_compiler.frontend.onnx.reading import OnnxModel
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.html import write_report


def emit_onnx(
    plan: Plan,
    model: OnnxModel,
    directory: Path,
    *,
    fixed: bool = False,
    force: bool = False,
    progress: Progress,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the package of a plan of an ONNX graph; see `codegen.package.emit`.

    Args:
        fixed: whether the model takes batches of one size only.

    Returns:
        The absolute path of the package.

    Raises:
        EmitError: when something stands there already, or it cannot be written.
    """

    def write(folder: Path) -> None:
        progress("writing the stages")
        places = write_stages(plan, model, folder)
        write_staged(plan, model, folder, places)
        texts = {
            "schedule.py": write_onnx_schedule(plan, fixed=fixed),
            "__init__.py": write_onnx_init(plan),
            "run.py": write_onnx_run(plan),
            "README.md": write_onnx_readme(plan),
            PLAN: plan.to_json(),
        }
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        copy_runtime(gpipe_compiler.runtime_onnx, folder / "runtime")
        write_report(plan, folder / "report.html")

    return place(directory, write, force=force, check=check)
