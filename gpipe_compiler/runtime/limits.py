"""Which numbers of samples a package takes: those that were tried, whole groups, one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UsageError


@dataclass(frozen=True, slots=True)
class SampleLimit:
    """Up to how many samples in a mini-batch a package was tried.

    Attributes:
        where: the line of the model that treats larger batches differently.
        in_pieces: whether it is one only of mini-batches that are cut into micro-batches.
    """

    samples: int
    where: str
    in_pieces: bool = False


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A number of samples, one after another, that a model takes together, such as pairs.

    Attributes:
        where: the line that does.
        in_loss: whether the loss alone does.
    """

    samples: int = 1
    where: str = ""
    in_loss: bool = False


NO_GROUP = SampleGroup()


def refuse_torn(
    name: str, group: SampleGroup, samples: Sequence[int], parts: int, *, makes_loss: bool
) -> None:
    """Makes sure that no group of samples lies in two micro-batches.

    Args:
        samples: in each micro-batch.
        parts: into which the mini-batch is cut.

    Raises:
        UsageError: naming the line that takes samples together.
    """
    torn = parts > 1 and any(count % group.samples for count in samples)
    if torn and (makes_loss or not group.in_loss):
        raise UsageError(
            f"{name} takes samples {group.samples} at a time, {group.where}: micro-batches of "
            f"{', '.join(map(str, samples))} samples tear them apart",
            hint=f"pass a multiple of {group.samples} samples (drop_last=True drops the rest of a "
            "DataLoader's data); or run it with microbatches=1",
        )


def refuse_alone(name: str, line: str, samples: Sequence[int]) -> None:
    """Makes sure that no micro-batch is of one sample where that is computed otherwise.

    Args:
        line: by which it treats one sample differently; "" where none does.

    Raises:
        UsageError: naming the line.
    """
    if line and 1 in samples:
        raise UsageError(
            f"{name} takes two samples or more: the model computes something else of a single "
            f"one, {line}",
            hint="pass more samples at once; or have the model not ask whether there is one",
        )


def refuse_untried(name: str, limits: Sequence[SampleLimit], samples: int, parts: int) -> None:
    """Makes sure that a mini-batch has no more samples than a package was tried with.

    Raises:
        UsageError: naming the line that treats larger ones differently.
    """
    for limit in limits:
        if samples > limit.samples and (parts > 1 or not limit.in_pieces):
            cut = " in several micro-batches" if limit.in_pieces else ""
            one = "; run it with microbatches=1" if limit.in_pieces else ""
            raise UsageError(
                f"{name} takes up to {limit.samples} samples{cut}, not {samples}: what it "
                f"does with more was not tried, {limit.where}",
                hint="pass fewer samples at once; or have the model not ask how many there are"
                + one,
            )
