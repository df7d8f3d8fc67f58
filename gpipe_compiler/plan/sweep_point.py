"""One of several plans of one trace that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.plan.plan import Plan


@dataclass(frozen=True)
class SweepPoint:
    """A plan for a number of devices, and for a size of mini-batch.

    Attributes:
        devices: of one replica of the pipeline.
        batch_size: samples of the mini-batch.
        plan: None where there can be none, for the reason that `problem` is.
    """

    devices: int
    batch_size: int
    plan: Plan | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits
