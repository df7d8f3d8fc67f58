"""The pipeline as its user sees it: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...runtime.errors import UsageError
from ...runtime.limits import refuse_alone, refuse_untried
from .arrays import array_of
from .batches import batch_size, join, sizes_of, split
from .devices import parse_devices
from .distributed import ProcessLinks, World, gathered, rank_here
from .engine import OnnxEngine, orders_for, run_local
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, SessionChoice


class OnnxPipeline:
    """The stages: all in this process, each device a thread; under torchrun, a process each.

        pipe = Pipeline()
        outputs = pipe({"images": images})        # numpy arrays by the model's own names

    Under torchrun every rank makes one and calls it alike; all get the outputs.

    Args:
        spec: of the package.
        folder: of the package.
        devices: `cpu,cuda:0`: one for each device of the pipeline, or one for all; as planned
            unless given.
        threads: of each stage's ops; one unless given, as the stages share the processor.
        custom_ops: libraries of custom operators that the model needs.

    Raises:
        UsageError: for devices and libraries that are not there.
        StageError: when ONNX Runtime refuses a stage.
    """

    def __init__(
        self,
        spec: OnnxPipelineSpec,
        folder: Path,
        *,
        devices: str | Sequence[str] | None = None,
        threads: int = 1,
        custom_ops: Sequence[Path] = (),
    ) -> None:
        missing = [str(library) for library in custom_ops if not library.is_file()]
        if missing:
            raise UsageError(f"there is no library {', '.join(missing)}")
        self.spec = spec
        devices = spec.devices if devices is None else devices
        text = devices if isinstance(devices, str) else ",".join(devices)
        self.devices = parse_devices(text, len(spec.devices))
        self._world = World(len(spec.devices)) if rank_here() is not None else None
        mine = range(len(spec.devices)) if self._world is None else (self._world.rank,)
        self._engines: dict[int, OnnxEngine] = {}
        for number in mine:
            choice = SessionChoice(self.devices[number], threads, tuple(custom_ops))
            stages = {
                index: OnnxStage(index, stage, folder, choice)
                for index, stage in enumerate(spec.stages)
                if spec.placement[index] == number
            }
            self._engines[number] = OnnxEngine(spec, number, stages)

    @property
    def rank(self) -> int:
        """This process's number; 0 where there is but one."""
        return 0 if self._world is None else self._world.rank

    def close(self) -> None:
        """Leave the other ranks. Not needed where there are none."""
        if self._world is not None:
            self._world.close()

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
        refuse_alone(self.spec.name, self.spec.alone, sizes)
        refuse_untried(self.spec.name, self.spec.limits, sum(sizes), len(sizes))
        given = split(self.spec, inputs, sizes)
        dims = {output.name: output.batch_dim for output in self.spec.outputs}
        if self._world is None:
            found = run_local(self.spec, self._engines, given)
            arrays = [{name: array_of(v) for name, v in values.items()} for values in found]
            return join(dims, arrays)
        order = orders_for(self.spec, len(given))[self.rank]
        links = ProcessLinks(self.spec, self._world)
        mine = self._engines[self.rank].run(order, given, links)
        return join(dims, gathered(self.spec, self._world, mine))
