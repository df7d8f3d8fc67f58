"""Writes packages of PyTorch stages with their report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gpipe_compiler.codegen.package import Progress, place, write_package
from gpipe_compiler.errors import EmitError
from gpipe_compiler.frontend.subject import Hooks, Pretrained
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.html import write_report


def emit(
    plan: Plan,
    directory: Path,
    *,
    hooks: Hooks | None = None,
    force: bool = False,
    progress: Progress | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the package of a plan.

    Args:
        plan: with its graph, which holds the weights.
        hooks: the user's own file, for the data and the optimizer.
        force: replace the package that stands there already.
        example: a real tensor for every input, by name; that of the graph unless given.

    Returns:
        The absolute path of the package.

    Raises:
        EmitError: when something stands there already, when it cannot be written (permissions, a
            full disk), or when an op has no spelling as source code. Nothing is left behind.
    """
    if plan.graph is None:
        raise EmitError(
            "the plan has no graph, so there is no code to write",
            hint="plan the graph again: a plan read from JSON has no graph",
        )
    tell = progress or (lambda _: None)
    return place(
        directory,
        lambda folder: write_reported(plan, folder, hooks, tell, example),
        force=force,
    )


def write_reported(
    plan: Plan,
    folder: Path,
    hooks: Hooks | None,
    tell: Progress,
    example: Mapping[str, torch.Tensor] | None = None,
    pretrained: Pretrained | None = None,
) -> None:
    """Writes the files of a package, its report among them, into an empty folder; see `emit`."""
    write_package(plan, folder, hooks, tell, example, pretrained)
    write_report(plan, folder / "report.html")
