"""The output formats: how the stages of a plan are written, run and validated in each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gpipe_compiler.errors import UsageError

if TYPE_CHECKING:
    from gpipe_compiler.codegen.package import Progress
    from gpipe_compiler.options import CompileOptions
    from gpipe_compiler.plan import Plan
    from gpipe_compiler.plan.pareto import Frontier
    from gpipe_compiler.planner.planner import Planner
    from gpipe_compiler.validate.launching import Launch
    from gpipe_compiler.validate.package import Validation


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """An output format that has not been imported yet.

    Attributes:
        module: the module of this package whose `open_target` is an `OpenTarget`.
        needs: packages that have to be installed besides the dependencies of this one.
        suffix: of the model files that are compiled to this format, and to no other; "" for a
            format of torch models.
    """

    module: str
    needs: tuple[str, ...] = ()
    suffix: str = ""


TARGETS: Mapping[str, OutputFormat] = {
    "torch": OutputFormat("targets.torch_stages"),
    "onnxruntime": OutputFormat("onnx.exported", ("onnx", "onnxruntime", "onnxscript")),
    "onnx": OutputFormat("onnx.from_file", ("onnx", "onnxruntime"), suffix=".onnx"),
}
"""By name, as `--target` takes it where the format is one of torch models."""


def of_file(model: str) -> str | None:
    """The name of the format that a model file is compiled to; None for a torch model."""
    named = ((name, known.suffix) for name, known in TARGETS.items() if known.suffix)
    return next((name for name, suffix in named if model.lower().endswith(suffix)), None)


def load(name: str) -> OpenTarget:
    """What opens a model for the format of this name.

    Raises:
        UsageError: where there is no such format, or a package that it needs is not installed.
    """
    if name not in TARGETS:
        raise UsageError(f"there is no target {name}", hint=f"choose {', '.join(TARGETS)}")
    known = TARGETS[name]
    missing = [need for need in known.needs if importlib.util.find_spec(need) is None]
    if missing:
        what = f"an {known.suffix} file" if known.suffix else f"--target {name}"
        raise UsageError(
            f"{what} needs {' and '.join(missing)}, which is not installed",
            hint="pip install gpipe-compiler[onnx]",
        )
    opener: OpenTarget = importlib.import_module(f"gpipe_compiler.{known.module}").open_target
    return opener


class Target(Protocol):
    """A traced model, to be compiled to one output format.

    Attributes:
        under_torchrun: a package's `run.py` may be started once for each device.
    """

    under_torchrun: ClassVar[bool]

    @property
    def options(self) -> CompileOptions:
        """What to compile to, as the format can have it."""

    @property
    def planner(self) -> Planner:
        """Plans the model's graph."""

    @property
    def batch(self) -> str:
        """Which dimensions are the batch, where they are others than 0 or not proven."""

    def plan(self, progress: Progress) -> tuple[Plan, Frontier | None]:
        """The plan; and the settings that it was chosen from, where they are not all given.

        Raises:
            ModelError: where micro-batches do not give what the mini-batch does.
            PlanError, UsageError: where there can be no plan.
        """

    def write(self, plan: Plan, folder: Path, progress: Progress) -> None:
        """Writes the package, `plan.json`, `report.html` and `README.md` with it, into a folder.

        Raises:
            EmitError: where something of the model cannot be written in this format.
        """

    def validate(self, plan: Plan, folder: Path) -> Validation | str:
        """How the package in a folder compares with the model; or why nothing was compared.

        Raises:
            ValidationError: when the package does not run. Differences are not raised.
        """

    def timed(self, plan: Plan, folder: Path, progress: Progress) -> Plan:
        """The plan with what a step of the package takes here, where asked for."""


class OpenTarget(Protocol):
    """Traces or reads a model for an output format.

    Args:
        model: a `Subject`; what else a format of files takes.
        launch: runs a script where this compiler cannot be imported.

    Raises:
        UsageError: for options that the format cannot have.
        ModelError, TraceError: where the model is at fault.
    """

    def __call__(
        self, model: Any, options: CompileOptions, progress: Progress, launch: Launch
    ) -> Target: ...
