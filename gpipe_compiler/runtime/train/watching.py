"""The numbers of every step, for the user's `log` and for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..core.pipeline import Pipeline
from ..core.ranks import from_rank_0
from ..errors import PipelineError, UsageError
from .data import has_tokens
from .evaluation import EvaluationResult
from .hooks import UserHooks
from .optimizer import StepResult
from .told import Told, planned_samples

_FLUSH_S = 10
"""Seconds of which a process that is killed loses what it gave to TensorBoard."""


class Watchers:
    """Hands the numbers of every step to the user's `log` and to TensorBoard, both on rank 0.

    Every rank makes one and calls it alike: each tells of its own devices, and what the user's
    code raises on rank 0 ends all.

    Args:
        steps: that are done; TensorBoard hides what it has of later ones.
        tensorboard: the folder of its files; None for none.
        told: the prediction for a mini-batch, where this run is the one that was planned.
        accumulate: mini-batches for a step.
    """

    def __init__(
        self,
        pipe: Pipeline,
        hooks: UserHooks,
        steps: int,
        tensorboard: Path | None,
        told: Told | None,
        accumulate: int,
    ) -> None:
        self.pipe, self.hooks, self.told, self.accumulate = pipe, hooks, told, accumulate
        self._planned = planned_samples(pipe.spec) * pipe.replicas * accumulate
        self._wanted = hooks.log is not None or tensorboard is not None
        self._writer: _TensorBoard | None = None
        if not self._wanted:
            return
        self._gpus = [e.device for e in pipe.execution.engines if e.device.type == "cuda"]
        some = torch.tensor(float(bool(self._gpus)))
        self._memory_is_told = bool(pipe.world.maximum(some, "the kinds of devices"))
        own = [e.device for e in pipe.execution.engines]
        names = [torch.cuda.get_device_name(x) if x.type == "cuda" else x.type for x in own]
        found = pipe.world.gather_objects(names, "the names of devices")
        self._names = frozenset(name for rank in found for name in rank)
        # Where replicas load their own rows, each knows its own alone.
        self._tokens_are_summed = has_tokens(pipe.spec) and pipe.replicas > 1

        def begin() -> None:
            if tensorboard is not None:
                self._writer = _TensorBoard(tensorboard, steps)

        from_rank_0(pipe.world, "opening TensorBoard's files", begin)

    def step(self, step: int, stepped: StepResult, seconds: float) -> None:
        """A step is done.

        Raises:
            PipelineError: when the user's code raises, or the files cannot be written; AgreedError
                on the other ranks.
        """
        if not self._wanted:
            return
        peaks: list[list[int]] = []
        if self._memory_is_told:
            own = [torch.cuda.max_memory_allocated(device) for device in self._gpus]
            peaks = self.pipe.world.gather_objects(own, "the memory of devices")

        tokens = stepped.tokens
        if self._tokens_are_summed:
            mine = torch.tensor(float(tokens or 0), dtype=torch.float64)
            tokens = int(self.pipe.world.sum(mine, "the tokens of the step"))

        def tell() -> None:
            numbers = {"loss": stepped.loss, "learning_rate": stepped.rate}
            if stepped.gradient_norm is not None:
                numbers["gradient_norm"] = stepped.gradient_norm
            numbers["samples_per_s"] = stepped.samples / seconds
            if tokens is not None:
                numbers["tokens_per_s"] = tokens / seconds
            for device, peak in enumerate(peak for rank in peaks for peak in rank):
                numbers[f"peak_bytes/device_{device}"] = float(peak)
            if self.told is not None and stepped.samples == self._planned:
                numbers |= self.told.numbers(seconds, self._names, self.accumulate)
            if self._writer is not None:
                self._writer.add(step, numbers)
            self.hooks.logged(step, numbers)

        from_rank_0(self.pipe.world, "the log", tell)

    def evaluation(self, step: int, found: EvaluationResult) -> None:
        """An evaluation is done, of which TensorBoard alone is told."""
        if self._writer is not None:
            numbers = {"loss": found.loss, **found.metrics}
            self._writer.add(step, {f"evaluation/{name}": x for name, x in numbers.items()})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def check_tensorboard() -> None:
    """Refuses to begin without the package that writes its files.

    Raises:
        UsageError: when it cannot be imported.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs the package tensorboard, and it cannot be imported: {error}",
            hint="pip install tensorboard",
        ) from error


class _TensorBoard:
    """The files of one run.

    Raises:
        PipelineError: here or later, when they cannot be written.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        with self._writing():
            module = importlib.import_module("torch.utils.tensorboard")
            self._writer: Any = module.SummaryWriter(
                str(folder), purge_step=steps + 1, flush_secs=_FLUSH_S
            )

    def add(self, step: int, numbers: dict[str, float]) -> None:
        with self._writing():
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        with self._writing():
            self._writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:  # of names that are no UTF-8, too
            why = getattr(error, "strerror", None) or error
            raise PipelineError(f"cannot write {self.folder}: {why}") from error
