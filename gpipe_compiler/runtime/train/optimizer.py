"""The optimizer of the command, and how its learning rate changes over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ..core.pipeline import Pipeline
from ..errors import UsageError
from ..spec import OptimizerKind
from .hooks import UserHooks

DEFAULT_RATES: Mapping[OptimizerKind, float] = {
    OptimizerKind.SGD: 0.01,
    OptimizerKind.MOMENTUM: 0.01,
    OptimizerKind.ADAM: 1e-3,
    OptimizerKind.ADAMW: 1e-3,
}


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
        """Whether the number of steps must be known at the start."""
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
    kind = choice.kind or OptimizerKind.SGD
    rate = DEFAULT_RATES[kind] if choice.rate is None else choice.rate
    makers: dict[OptimizerKind, Callable[[], torch.optim.Optimizer]] = {
        OptimizerKind.SGD: lambda: torch.optim.SGD(parameters, lr=rate),
        OptimizerKind.MOMENTUM: lambda: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        OptimizerKind.ADAM: lambda: torch.optim.Adam(parameters, lr=rate),
        OptimizerKind.ADAMW: lambda: torch.optim.AdamW(parameters, lr=rate),
    }
    return makers[kind]()


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

    Args:
        steps: in all, None where it is not known.

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


class Rate:
    """Steps a learning-rate scheduler after the optimizer or after evaluations.

    Args:
        scheduler: None for a constant rate. A ReduceLROnPlateau is stepped with the loss of every
            evaluation, any other with every step of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler

    @property
    def now(self) -> float:
        """The learning rate of the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def follows_evaluation(self) -> bool:
        """Whether the rate depends on evaluations."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def stepped(self) -> None:
        """The optimizer has made a step."""
        if self.scheduler is not None and not self.follows_evaluation:
            self.scheduler.step()

    def evaluated(self, loss: float) -> None:
        """An evaluation has given this loss."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
