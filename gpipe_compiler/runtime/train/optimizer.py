"""The optimizer of the command: one of its own kinds, or the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

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


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """What the user types about the optimizer.

    Attributes:
        kind: None for the user's own, or plain SGD where there is none.
        rate: the learning rate; None for the kind's usual one.
    """

    kind: OptimizerKind | None = None
    rate: float | None = None


def make_optimizer(
    pipe: Pipeline, hooks: UserHooks, choice: OptimizerChoice
) -> torch.optim.Optimizer:
    """The optimizer of the parameters held here.

    Raises:
        UsageError: when a learning rate is given for an optimizer of the user's.
        PipelineError: when the user's code raises, or gives no optimizer.
    """
    parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    if hooks.make_optimizer is not None and choice.kind is None:
        if choice.rate is not None:
            raise UsageError(
                f"make_optimizer() of {hooks.name} sets the learning rate",
                hint="name an --optimizer to use --lr",
            )
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
