"""The model without a pipeline: as it is on one device, or as replicas on several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What to expect of devices that each hold the whole model, and run it as it is written.

    Attributes:
        devices: which share the mini-batch, as data parallelism does; 1 for no parallelism.
        step_s: seconds of a mini-batch, where all devices compute at a time.
        here_s: the same where the cluster's devices are, which may share places (`Plan.here_s`).
        peak_bytes: of the device that is fullest.
        memory: bytes that this device has.
        problem: why this cannot be, in words, so that the figures mean nothing; "" where it can.
    """

    devices: int
    step_s: float = 0.0
    here_s: float = 0.0
    peak_bytes: int = 0
    memory: int = 0
    problem: str = ""

    @property
    def possible(self) -> bool:
        """Whether it can be, and every device holds what it takes."""
        return not self.problem and self.peak_bytes <= self.memory
