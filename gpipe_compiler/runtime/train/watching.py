"""The numbers of every step, for the user's `log` and for TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
from .told import Peak, Told

_FLUSH_S = 10
"""Seconds of which a process that is killed loses what it gave to TensorBoard."""


class Watchers:
    """Hands the numbers of every step to the user's `log` and to TensorBoard, both on rank 0.

    Every rank makes one and calls it alike: each tells of its own devices, and what the user's
    code raises on rank 0 ends all.

    Args:
        steps: that are done; TensorBoard hides what it has of later ones.
        tensorboard: the folder of its files; None for none.
        planned: by the samples of a step, what its plan tells.
    """

    def __init__(
        self,
        pipe: Pipeline,
        hooks: UserHooks,
        steps: int,
        tensorboard: Path | None,
        planned: Mapping[int, Planned],
    ) -> None:
        self.pipe, self.hooks, self.planned = pipe, hooks, planned
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
            if stepped.samples in self.planned:
                numbers |= self.planned[stepped.samples].told(seconds, self._names)
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


@dataclass(frozen=True)
class Planned:
    """What a plan tells of a step.

    Attributes:
        bubble: the share of device time that it expects to be spent waiting; None for not told.
        peak: its arithmetic at the peak of its devices; None for not told.
        minibatches: of the step.
    """

    bubble: float | None
    peak: Peak | None
    minibatches: int = 1

    def told(self, seconds: float, devices: Collection[str]) -> dict[str, float]:
        """The numbers of a step that took so long on devices that PyTorch calls so."""
        found = {} if self.bubble is None else {"planned_bubble": self.bubble}
        if self.peak is not None and all(map(self.peak.is_of, devices)):
            found["mfu"] = self.minibatches * self.peak.step_s / seconds
        return found


def planned_steps(pipe: Pipeline, directory: Path, accumulate: int) -> dict[int, Planned]:
    """By the samples of a step, what its plan tells of it.

    Empty where this run is not the one that was planned.

    Args:
        accumulate: mini-batches for a step.
    """
    spec = pipe.spec
    samples = spec.microbatches * spec.microbatch_size
    told = Told.of(pipe, directory, samples) if pipe.replicas == spec.replicas else None
    if told is None:
        return {}
    whole = samples * spec.replicas * accumulate
    return {whole: Planned(told.bubble, told.peak, accumulate)}


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
