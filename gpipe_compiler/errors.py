"""Every error this project raises on purpose: what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import PurePath

from gpipe_compiler.runtime.wording import printable, text_of


class ExitCode(IntEnum):
    """The command's exit codes."""

    DONE = 0
    MODEL = 1
    USAGE = 2
    VALIDATION = 3


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's program: absolute path (or a name such as `<stdin>`), line from 1.

    Attributes:
        callers: the lines that called its function, from that of a module's `forward` inwards.
        calls: the lines that called the modules around, each with the number of words in the path
            of its module, outermost first; those that are known.
    """

    file: str
    line: int
    function: str = ""
    code: str = ""
    callers: tuple[SourceLocation, ...] = ()
    calls: tuple[tuple[int, SourceLocation], ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def brief(self) -> str:
        """The file's own name, the line, and what stands there, on one line."""
        where = PurePath(self.file).name + (f":{self.line}" if self.line else "")
        return printable(f"{where}: {self.code}" if self.code else where)


def at_code(where: SourceLocation | None) -> str:
    """What stands at a line, behind what happens there: " at `x = y.item()`"; "" if not known."""
    return f" at `{where.code}`" if where is not None and where.code else ""


def summary(error: BaseException) -> str:
    """The type of an error and the first line of its text, which the user's own class may lack."""
    text = text_of(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class GPipeCompilerError(Exception):
    """The root of the hierarchy.

    Args:
        problem: what is wrong, in one sentence.
        location: the user's line that causes it, where one is known.
        hint: what the user can do about it.
    """

    exit_code = ExitCode.MODEL

    def __init__(
        self, problem: str, *, location: SourceLocation | None = None, hint: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.location = location
        self.hint = hint

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        advice = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{where}{self.problem}{advice}"


class Notice(UserWarning):
    """What the user should know of a model that is compiled all the same."""


class UsageError(GPipeCompilerError):
    """The command line or an argument of the API makes no sense, whatever the model."""

    exit_code = ExitCode.USAGE


class ModelError(GPipeCompilerError):
    """The model file, its factory or its example inputs are at fault."""


class UnsplittableError(ModelError):
    """Micro-batches of the model do not give what it makes of the mini-batch."""


class TraceError(GPipeCompilerError):
    """The model cannot be traced into a graph."""


class IllegalGraphError(GPipeCompilerError):
    """A graph breaks the rules of `ir/legality.py`; all violations are listed at once."""

    def __init__(self, stage: str, violations: Sequence[str]) -> None:
        listing = "\n".join(f"  - {violation}" for violation in violations)
        super().__init__(f"the graph is illegal after {stage}:\n{listing}")
        self.violations = tuple(violations)


class PlanError(GPipeCompilerError):
    """No plan satisfies what was asked for: more stages than ops, a batch that does not split."""


class EmitError(GPipeCompilerError):
    """The package cannot be written."""


class ValidationError(GPipeCompilerError):
    """The emitted package does not reproduce the original model."""

    exit_code = ExitCode.VALIDATION
