"""conv_net as a pipeline of 3 stages: `Pipeline`, for a loop of one's own."""

from collections.abc import Sequence
from pathlib import Path

import torch

from .runtime.core import pipeline as _pipeline
from .runtime.spec import BatchNorm, Precision, Remat, ScheduleKind, WeightSharding
from .schedule import SPEC

__all__ = ["SPEC", "WEIGHTS", "Pipeline"]

WEIGHTS: Path | None = Path(__file__).resolve().parent / "weights"


class Pipeline(_pipeline.Pipeline):
    """conv_net in 3 stages; `runtime/core/pipeline.py` documents it.

    `loss = pipe.step(inputs, target)` leaves gradients in `.grad`; `pipe(inputs)` infers. How the
    stages compute is as compiled, unless told otherwise.
    """

    def __init__(
        self,
        weights: Path | None = WEIGHTS,
        *,
        devices: Sequence[torch.device | str] | torch.device | str | None = None,
        microbatches: int | None = None,
        schedule: ScheduleKind | str | None = None,
        remat: Remat | str | None = None,
        batchnorm: BatchNorm | str | None = None,
        precision: Precision | str | None = None,
        seed: int = 0,
        transport: _pipeline.TransportKind | str | None = None,
        data_parallel: int = 1,
        sharding: WeightSharding | str | None = None,
        compile_blocks: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(
            SPEC,
            weights,
            devices=devices,
            microbatches=microbatches,
            schedule=schedule,
            remat=remat,
            batchnorm=batchnorm,
            precision=precision,
            seed=seed,
            transport=transport,
            data_parallel=data_parallel,
            sharding=sharding,
            compile_blocks=compile_blocks,
            timeout_s=timeout_s,
        )
