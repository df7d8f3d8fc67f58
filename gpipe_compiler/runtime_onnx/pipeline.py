"""The pipeline as its user sees it: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .batches import batch_size, join, sizes_of, split
from .devices import DeviceChoice, parse_devices
from .engine import Engine
from .local import run_local
from .spec import PipelineSpec
from .stage import SessionChoice, Stage


class Pipeline:
    """All stages in this process, each device a thread of its own.

        pipe = Pipeline()
        outputs = pipe({"images": images})        # numpy arrays by the model's own names

    Args:
        spec: of the package.
        folder: of the package.
        devices: `cpu,cuda:0`: one for each device of the pipeline, or one for all; as planned
            unless given.
        threads: of each stage's ops; one unless given, as the stages share the processor.
        custom_ops: libraries of custom operators that the model needs.

    Raises:
        UsageError: for devices that are not there.
        StageError: when ONNX Runtime refuses a stage.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        folder: Path,
        *,
        devices: str | Sequence[str] | None = None,
        threads: int = 1,
        custom_ops: Sequence[Path] = (),
    ) -> None:
        self.spec = spec
        self.devices = choices(spec, devices)
        made = [
            SessionChoice(device, threads, custom_ops=tuple(custom_ops)) for device in self.devices
        ]
        self._engines = {
            number: Engine(spec, load_stages(spec, folder, number, choice))
            for number, choice in enumerate(made)
        }

    def __call__(
        self, inputs: Mapping[str, np.ndarray], *, microbatches: int | None = None
    ) -> dict[str, np.ndarray]:
        """The outputs of a mini-batch, by name.

        Args:
            microbatches: micro-batches of the planned size unless given.

        Raises:
            UsageError: for inputs that do not fit.
            StageError: when a stage fails.
        """
        sizes = sizes_of(self.spec, batch_size(self.spec, inputs), microbatches)
        return join(self.spec, run_local(self.spec, self._engines, split(self.spec, inputs, sizes)))


def choices(spec: PipelineSpec, devices: str | Sequence[str] | None) -> tuple[DeviceChoice, ...]:
    """The devices of a pipeline, as asked or as planned.

    Raises:
        UsageError: for devices that are not there.
    """
    if devices is None:
        devices = spec.devices
    text = devices if isinstance(devices, str) else ",".join(devices)
    return parse_devices(text, len(spec.devices))


def load_stages(
    spec: PipelineSpec, folder: Path, device: int, choice: SessionChoice
) -> dict[int, Stage]:
    """The stages that lie on a device, by number.

    Raises:
        StageError: when ONNX Runtime refuses one.
    """
    return {
        index: Stage(index, stage, folder, choice)
        for index, stage in enumerate(spec.stages)
        if spec.placement[index] == device
    }
