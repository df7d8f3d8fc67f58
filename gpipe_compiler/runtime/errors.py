"""What goes wrong when a package runs, in words its user can act on."""

from __future__ import annotations

from collections.abc import Sequence


class PipelineError(Exception):
    """The root of the runtime's errors.

    Args:
        problem: what is wrong, in one sentence.
        hint: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}\n  hint: {self.hint}" if self.hint else self.problem


class UsageError(PipelineError):
    """The caller passes something that this pipeline does not take."""

    exit_code = 2


class AgreedError(PipelineError):
    """Every rank raises it alike, or follows rank 0's error: rank 0 alone reports it."""


class ScheduleError(PipelineError):
    """A schedule is incomplete: an action, a transfer or a value is missing or doubled."""


class DeadlockError(ScheduleError):
    """A schedule in which devices wait for ever.

    Attributes:
        stuck: for every device that waits, its number and what it waits at.
    """

    def __init__(self, stuck: Sequence[tuple[int, str]]) -> None:
        listing = "".join(f"\n  device {device} waits at {action}" for device, action in stuck)
        super().__init__(f"the schedule never ends:{listing}")
        self.stuck = tuple(stuck)


class StageError(PipelineError):
    """A stage's own code raised; the cause is chained."""


class TransportError(PipelineError):
    """A value did not arrive: the other side is dead, or too slow."""


class WeightsError(PipelineError):
    """The weights of a package are missing, or are those of another model."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, is damaged, or is that of another model."""
