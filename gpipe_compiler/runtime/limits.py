"""Up to how many samples a package was tried."""

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


def refuse_untried(name: str, limits: Sequence[SampleLimit], samples: int, parts: int) -> None:
    """Makes sure that a mini-batch has no more samples than a package was tried with.

    Args:
        name: of the model.
        parts: into which the mini-batch is cut.

    Raises:
        UsageError: naming the line that treats larger ones differently.
    """
    for limit in limits:
        if samples > limit.samples and (parts > 1 or not limit.in_pieces):
            cut = " in several micro-batches" if limit.in_pieces else ""
            one = "; run it with microbatches=1" if limit.in_pieces else ""
            raise UsageError(
                f"{name} takes up to {limit.samples} samples{cut}, not {samples}: what it "
                f"does with more took too long to be tried, {limit.where}",
                hint="pass fewer samples at once; or have the model not ask how many there are"
                + one,
            )
