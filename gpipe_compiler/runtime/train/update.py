"""One step of the optimizer: gradients of some mini-batches, clipped, and the weights changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..core.pipeline import Pipeline
from ..errors import AgreedError, UsageError
from .batches import NOTHING, Batch, located
from .data import samples_of
from .optimizer import Rate

MOST_SKIPPED = 50
"""Consecutive steps that may be skipped: the scale of fp16 gradients halves at each of them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step of the optimizer.

    Attributes:
        loss: the mean over its mini-batches.
        rate: the learning rate that it was made with.
        samples: in its mini-batches, over all replicas; 0 on ranks that read no data.
        gradient_norm: over all stages, before clipping; None unless gradients are clipped.
        skipped: whether the weights stayed, because fp16 gradients have overflowed.
    """

    loss: float
    rate: float
    samples: int
    gradient_norm: float | None
    skipped: bool


class Update:
    """Makes steps of an optimizer: that of the plain loop

        for inputs, target in batches:
            (loss(model(inputs), target) / len(batches)).backward()
        clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()

    Args:
        clip_norm: the largest 2-norm of all gradients together; None for any.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        rate: Rate,
        clip_norm: float | None = None,
    ) -> None:
        self.pipe = pipe
        self.optimizer = optimizer
        self.rate = rate
        self.clip_norm = clip_norm
        self._skipped = 0

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Step on some mini-batches.

        Args:
            batches: `NOTHING`, as often, on ranks that read no data.
            step: its number, for messages.

        Raises:
            AgreedError: when a loss or a gradient is not finite, or replicas have read other data;
                the weights have not changed.
            UsageError: when a batch does not fit the pipeline, with its place in the data.
        """
        self.pipe.zero_grad()
        weight = 1 / len(batches)
        with self.pipe.no_sync():
            losses = [self._accumulate(batch, weight, step) for batch in batches[:-1]]
        losses.append(self._accumulate(batches[-1], weight, step))
        rate = self.rate.now
        norm = self._clip(step)
        if norm is None and not self.pipe.scaler.is_enabled():
            self._check_gradients(step)
        skipped = self._step()
        self._count_skipped(skipped, step)
        if not skipped:
            self.rate.stepped()
        samples = sum(self._samples(batch) for batch in batches)
        return StepResult(sum(losses) / len(losses), rate, samples, norm, skipped)

    def _accumulate(self, batch: Batch, weight: float, step: int) -> float:
        try:
            share = self.pipe.shard(batch.inputs, batch.target)
            loss = float(self.pipe.step(*share, weight=weight))
        except UsageError as error:
            raise located(error, batch) from error
        except AgreedError as error:
            raise located(error, batch, step) from error
        if not math.isfinite(loss) and not self.pipe.scaler.is_enabled():
            where = f", {batch.place}" if batch.place else ""
            raise AgreedError(f"the loss of step {step}{where}, is {loss}")
        return loss

    def _clip(self, step: int) -> float | None:
        if self.clip_norm is None:
            return None
        self.pipe.scaler.unscale_(self.optimizer)
        norm = float(self.pipe.clip_grad_norm_(self.clip_norm))
        if not math.isfinite(norm) and not self.pipe.scaler.is_enabled():
            raise AgreedError(f"the norm of the gradients of step {step} is {norm}")
        return norm

    def _check_gradients(self, step: int) -> None:
        """Refuse gradients that would spoil the weights: a finite loss may have such, too.

        Raises:
            AgreedError: on every rank, when one anywhere is not finite.
        """
        own = _largest(self.pipe.parameters())
        largest = self.pipe.world.maximum(own, "the largest gradient")
        if not bool(largest.isfinite()):
            raise AgreedError(f"a gradient of step {step} is {float(largest)}")

    def _step(self) -> bool:
        """Change the weights; whether that was skipped."""
        scaler = self.pipe.scaler
        before = scaler.get_scale() if scaler.is_enabled() else 1.0
        scaler.step(self.optimizer)
        scaler.update()
        return scaler.is_enabled() and scaler.get_scale() < before

    def _count_skipped(self, skipped: bool, step: int) -> None:
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped >= MOST_SKIPPED:
            raise AgreedError(
                f"the gradients overflow fp16 at every one of the last {MOST_SKIPPED} steps, up to "
                f"step {step}, whatever they are scaled by",
                hint="train with --precision bf16 or fp32",
            )

    def _samples(self, batch: Batch) -> int:
        if batch is NOTHING:
            return 0
        pipe = self.pipe
        return samples_of(pipe.spec, pipe.microbatches, batch.inputs, batch.target)


def _largest(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The largest element of all gradients, without its sign; nan if one is nan."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        elements = gradient._values() if gradient.is_sparse else gradient
        if elements.numel():
            groups.setdefault((elements.device, elements.dtype), []).append(elements)
    largest = torch.zeros((), dtype=torch.float64)
    for group in groups.values():
        norms = torch.stack(torch._foreach_norm(group, math.inf))
        largest = torch.maximum(largest, norms.amax().to("cpu", torch.float64))
    return largest
