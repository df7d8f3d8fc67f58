"""A model in one output format: how its stages are planned, written, run and validated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from gpipe_compiler.codegen.package import Progress
    from gpipe_compiler.options import CompileOptions
    from gpipe_compiler.plan import Plan
    from gpipe_compiler.plan.pareto import Frontier
    from gpipe_compiler.planner.planner import Planner
    from gpipe_compiler.validate.launching import Launch
    from gpipe_compiler.validate.package import Validation


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
