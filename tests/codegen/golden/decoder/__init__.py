"""decoder as a pipeline of 3 stages: `Pipeline`, for a loop of one's own."""

from collections.abc import Sequence
from pathlib import Path

import torch

from .runtime import pipeline as _pipeline
from .runtime.spec import ScheduleKind
from .schedule import SPEC

__all__ = ["SPEC", "WEIGHTS", "Pipeline"]

WEIGHTS: Path | None = Path(__file__).resolve().parent / "weights"


class Pipeline(_pipeline.Pipeline):
    """decoder in 3 stages; `runtime/pipeline.py` tells what it can do.

    `loss = pipe.step(inputs, target)` leaves gradients in `.grad`; `pipe(inputs)` infers.
    """

    def __init__(
        self,
        weights: Path | None = WEIGHTS,
        *,
        devices: Sequence[torch.device | str] | torch.device | str | None = None,
        microbatches: int | None = None,
        schedule: ScheduleKind | str | None = None,
        seed: int = 0,
        transport: _pipeline.TransportKind | str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(
            SPEC,
            weights,
            devices=devices,
            microbatches=microbatches,
            schedule=schedule,
            seed=seed,
            transport=transport,
            timeout_s=timeout_s,
        )
