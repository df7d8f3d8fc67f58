"""Writes a package of ONNX stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gpipe_compiler.onnx.runtime
from gpipe_compiler.codegen.package import PLAN, Progress, copy_runtime, place
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


def emit_onnx(
    plan: Plan,
    model: OnnxModel,
    directory: Path,
    *,
    sizes: InputSizes,
    force: bool = False,
    progress: Progress,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the package of a plan of an ONNX graph; see `codegen.package.emit`.

    Returns:
        The absolute path of the package.

    Raises:
        EmitError: when something stands there already, or it cannot be written.
    """

    def write(folder: Path) -> None:
        progress("writing the stages")
        places = write_stages(plan, model, folder)
        write_staged(plan, model, folder, places)
        assert plan.graph is not None
        close = closeness(plan.graph, quantised=is_quantised(plan.graph))
        _write_program(plan, folder, Traits(close, sizes.fixed, sizes.free))

    return place(directory, write, force=force, check=check)


def emit_exported(
    plan: Plan,
    directory: Path,
    *,
    force: bool = False,
    progress: Progress,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the package of a plan of a torch model, each stage exported by torch.onnx.

    Returns:
        The absolute path of the package.

    Raises:
        EmitError: when a stage cannot be exported, when something stands there already, or when it
            cannot be written.
    """

    def write(folder: Path) -> None:
        export_stages(plan, folder, progress)
        write_whole(plan, folder)
        assert plan.graph is not None
        _write_program(plan, folder, Traits(closeness(plan.graph, quantised=False)))

    return place(directory, write, force=force, check=check)


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
