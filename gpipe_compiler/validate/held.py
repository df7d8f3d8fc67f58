"""A package that is held against its model before it is put in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpipe_compiler.codegen.package import Progress, failed_place
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.html import write_report
from gpipe_compiler.validate.package import Validation


@dataclass
class Held:
    """Holds a package against its model.

    Attributes:
        compare: of a package in a folder; says why where nothing is compared. None where that is
            not asked for.
        found: what was compared, once `hold` was called.
        refused: why nothing was, where it was asked for.
    """

    plan: Plan
    progress: Progress
    compare: Callable[[Path], Validation | str] | None
    found: Validation | None = None
    refused: str = ""

    def hold(self, folder: Path) -> None:
        """Raises ValidationError where the package in a folder does not equal the model."""
        if self.compare is None:
            return
        self.progress("validating the package against the model")
        held = self.compare(folder)
        if isinstance(held, str):
            self.refused = held
            return
        self.found = held
        write_report(self.plan, folder / "report.html", held)
        refuse_failed(held)


@contextlib.contextmanager
def left_aside(directory: Path) -> Iterator[None]:
    """Lets a ValidationError tell too where the package is that was to go to a directory."""
    try:
        yield
    except ValidationError as error:
        left = f"the package is left in {failed_place(directory)} to look at; do not train with it"
        hint = f"{error.hint}; {left}" if error.hint else left
        raise ValidationError(error.problem, location=error.location, hint=hint) from error


def refuse_failed(validation: Validation) -> None:
    """Raises the ValidationError of a validation that failed."""
    if validation.passed:
        return
    faults = [f"{row.what} {fault}" for row in validation.rows for fault in row.faults]
    listing = "".join(f"\n  - {fault}" for fault in faults[:20])
    more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
    raise ValidationError(f"the package does not reproduce the model:{listing}{more}")
