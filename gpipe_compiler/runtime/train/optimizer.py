"""The optimizer of the command: how its learning rate changes, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ..core.pipeline import Pipeline
from ..core.shards import local
from ..errors import AgreedError, PipelineError, UsageError
from ..spec import OptimizerKind
from ..wording import said
from .data import NOTHING, Batch, counts_of, has_tokens, located, share_read
from .hooks import UserHooks

_OPTIMIZERS: Mapping[OptimizerKind, tuple[type[torch.optim.Optimizer], Mapping[str, float]]] = {
    OptimizerKind.SGD: (torch.optim.SGD, {"lr": 0.01}),
    OptimizerKind.MOMENTUM: (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    OptimizerKind.ADAM: (torch.optim.Adam, {"lr": 1e-3}),
    OptimizerKind.ADAMW: (torch.optim.AdamW, {"lr": 1e-3}),
}
"""The class of each, and its usual options."""


class RateShape(Enum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """The options of the optimizer and its learning rate.

    Attributes:
        kind: None for the user's own, or plain SGD where there is none.
        rate: the learning rate; None for the kind's usual one.
        shape: None for the scheduler of the user's file, or a constant rate where there is none.
        warmup: the first steps, over which the rate rises in equal parts to the full one.
    """

    kind: OptimizerKind | None = None
    rate: float | None = None
    shape: RateShape | None = None
    warmup: int = 0

    @property
    def needs_end(self) -> bool:
        return self.shape in (RateShape.LINEAR, RateShape.COSINE)


def make_optimizer(
    pipe: Pipeline, hooks: UserHooks, choice: OptimizerChoice
) -> torch.optim.Optimizer:
    """The optimizer of the parameters held here.

    Raises:
        PipelineError: when the user's code raises, or gives no optimizer.
    """
    parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    if hooks.make_optimizer is not None and choice.kind is None:
        return hooks.optimizer(parameters)
    cls, usual = _OPTIMIZERS[choice.kind or OptimizerKind.SGD]
    rate = {} if choice.rate is None else {"lr": choice.rate}
    return cls(parameters, **{**usual, **rate})  # type: ignore[arg-type]  # each takes these


def rate_factor(shape: RateShape, warmup: int, steps: int | None) -> Callable[[int], float]:
    """The share of the full learning rate at each step, the first step being number 0.

    Step s of a warm-up of W steps is at (s+1)/W. Afterwards, where p = (s-W)/(S-W) is how much of
    the other steps is done, linear is at 1-p and cosine (Loshchilov and Hutter, arXiv 1608.03983,
    without restarts) at (1 + cos(pi p)) / 2; from step S on both are at 0.

    Args:
        steps: S, in all; a constant rate needs none.
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if shape is RateShape.CONSTANT or steps is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 1.0 - done if shape is RateShape.LINEAR else (1.0 + math.cos(math.pi * done)) / 2

    return factor


def make_scheduler(
    optimizer: torch.optim.Optimizer, hooks: UserHooks, choice: OptimizerChoice, steps: int | None
) -> LRScheduler | None:
    """The scheduler that is stepped after every step of the optimizer; None for a constant rate.

    Raises:
        UsageError: when the warm-up leaves no steps, or their number is missing.
        PipelineError: when the user's code raises, or gives no scheduler.
    """
    if choice.shape is None and hooks.make_scheduler is not None:
        return hooks.scheduler(optimizer)
    shape = choice.shape or RateShape.CONSTANT
    if choice.needs_end and steps is None:
        raise UsageError(
            f"--lr-schedule {shape.value} must know the number of steps, and train_data() does not "
            "tell it (it has no len())",
            hint="give --steps too; training ends at whichever of --steps and --epochs comes first",
        )
    if choice.needs_end and steps is not None and choice.warmup >= steps:
        raise UsageError(
            f"the warm-up of {choice.warmup} steps leaves nothing of {steps} steps",
            hint="choose fewer --warmup-steps",
        )
    if shape is RateShape.CONSTANT and not choice.warmup:
        return None
    return LambdaLR(optimizer, rate_factor(shape, choice.warmup, steps))


@dataclass(eq=False)
class Rate:
    """Steps a learning-rate scheduler after the optimizer or after evaluations.

    Args:
        scheduler: None for a constant rate. A ReduceLROnPlateau is stepped with the loss of every
            evaluation, any other with every step of the optimizer.
    """

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None

    @property
    def now(self) -> float:
        """The learning rate of the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def stepped(self) -> None:
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def evaluated(self, loss: float) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)


# --- one step -------------------------------------------------------------------------------------

MOST_SKIPPED = 50
"""Consecutive steps that may be skipped: the scale of fp16 gradients halves at each of them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step of the optimizer.

    Attributes:
        loss: the mean over its mini-batches.
        rate: the learning rate that it was made with.
        samples: in its mini-batches, over all replicas; of one alone, 0 on ranks that read no data.
        tokens: the same; None where no size of the pipeline is called so.
        gradient_norm: over all stages, before clipping; None where it is not computed.
        skipped: whether the weights stayed, because fp16 gradients have overflowed.
    """

    loss: float
    rate: float
    samples: int
    gradient_norm: float | None
    skipped: bool
    tokens: int | None = None


@dataclass(eq=False)
class Update:
    """Makes steps of an optimizer: that of the plain loop

        for inputs, target in batches:
            (loss(model(inputs), target) / len(batches)).backward()
        clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()

    Args:
        clip_norm: the largest 2-norm of all gradients together; None for any. With inf it is
            computed, and changes nothing.
    """

    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    rate: Rate
    clip_norm: float | None = None
    _skipped: int = field(default=0, init=False)

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Step on some mini-batches.

        Args:
            batches: `NOTHING`, as often, on ranks that read no data.
            step: its number, for messages.
        """
        self.pipe.zero_grad()
        weight = 1 / len(batches)
        with self.pipe.no_sync():
            done = [self._accumulate(batch, weight, step) for batch in batches[:-1]]
        done.append(self._accumulate(batches[-1], weight, step))
        rate = self.rate.now
        norm = self._clip(step)
        if norm is None and not self.pipe.scaler.is_enabled():
            self._check_gradients(step)
        skipped = self._step(step)
        self._count_skipped(skipped, step)
        losses, samples, tokens = map(sum, zip(*done, strict=True))
        if self.pipe.replicas > 1:  # each knows its own share alone
            mine = torch.tensor([samples, tokens], dtype=torch.float64)
            samples, tokens = map(int, self.pipe.world.sum(mine, "the samples of the step"))
        told = int(tokens) if has_tokens(self.pipe.spec) else None
        return StepResult(losses / len(batches), rate, int(samples), norm, skipped, told)

    def _accumulate(self, batch: Batch, weight: float, step: int) -> tuple[float, int, int]:
        """The loss of a mini-batch, and the samples and tokens of this replica's share of it."""
        pipe = self.pipe
        try:
            share = share_read(pipe, batch)
            loss = float(pipe.step(*share, weight=weight))
        except UsageError as error:
            raise located(error, batch) from error
        except AgreedError as error:
            raise located(error, batch, step) from error
        if not math.isfinite(loss) and not self.pipe.scaler.is_enabled():
            where = f", {batch.place}" if batch.place else ""
            raise AgreedError(f"the loss of step {step}{where}, is {loss}")
        counts = (0, 0) if batch is NOTHING else counts_of(pipe.spec, pipe.microbatches, *share)
        return loss, *counts

    def _clip(self, step: int) -> float | None:
        if self.clip_norm is None:
            return None
        self.pipe.scaler.unscale_(self.optimizer)
        norm = float(self.pipe.clip_grad_norm_(self.clip_norm))
        if not math.isfinite(norm) and not self.pipe.scaler.is_enabled():
            raise AgreedError(f"the norm of the gradients of step {step} is {norm}")
        return norm

    def _check_gradients(self, step: int) -> None:
        """Refuse gradients that would spoil the weights: a finite loss may have such, too."""
        own = _largest(self.pipe.parameters())
        largest = self.pipe.world.maximum(own, "the largest gradient")
        if not bool(largest.isfinite()):
            raise AgreedError(f"a gradient of step {step} is {float(largest)}")

    def _step(self, step: int) -> bool:
        """Change the weights, and then the rate; whether that was skipped.

        Raises:
            PipelineError: when the optimizer or its scheduler raises: the user's own, or torch's
                for a rate that the type of the weights does not hold.
        """
        scaler = self.pipe.scaler
        before = scaler.get_scale() if scaler.is_enabled() else 1.0
        rate = self.rate.now
        try:
            scaler.step(self.optimizer)
            scaler.update()
            skipped = scaler.is_enabled() and scaler.get_scale() < before
            if not skipped:
                self.rate.stepped()
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(
                f"step {step} of {type(self.optimizer).__name__}, at the learning rate {rate:g}, "
                f"failed: {said(error)}",
                hint="--traceback shows where",
            ) from error
        return skipped

    def _count_skipped(self, skipped: bool, step: int) -> None:
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped >= MOST_SKIPPED:
            raise AgreedError(
                f"the gradients overflow fp16 at every one of the last {MOST_SKIPPED} steps, up to "
                f"step {step}, whatever they are scaled by",
                hint="train with --precision bf16 or fp32",
            )


def _largest(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The largest element of all gradients, without its sign; nan if one is nan."""
    gradients = (local(parameter.grad) for parameter in parameters if parameter.grad is not None)
    elements = [each._values() if each.is_sparse else each for each in gradients]
    norm = get_total_norm([each for each in elements if each.numel()], math.inf)
    return norm.to("cpu", torch.float64)
