"""How much each micro-batch's loss counts in the loss of the mini-batch.

The mean over a mini-batch is the mean of the micro-batches' means, each weighted by what it is
taken over: by samples, or by what `LossSpec.weight` counts, such as the tokens that are no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .errors import UsageError
from .job import Values
from .spec import LossSpec, PipelineSpec, Reduction
from .weights import Weights, build_stage


class Scales:
    """Weighs micro-batches by what the loss's mean is taken over.

    Args:
        weights: where the state of `LossSpec.weight` is, such as the weights of classes.
    """

    def __init__(self, spec: PipelineSpec, weights: Weights | None, seed: int) -> None:
        self.loss = spec.loss
        self.module: nn.Module | None = None
        if self.loss is not None and self.loss.weight is not None:
            self.module = build_stage(self.loss.weight, weights, torch.device("cpu"), seed)

    def weigh(self, parts: Sequence[Values], sizes: Sequence[int]) -> tuple[float, ...]:
        """What each micro-batch's loss is a mean over: a number of samples, of tokens, ...

        All ones for a loss that is a sum.

        Raises:
            UsageError: when it cannot be counted, as where a label is of no class.
        """
        if self.loss is None or self.loss.reduction is Reduction.SUM:
            return (1.0,) * len(sizes)
        if self.module is None or self.loss.weight is None:
            return tuple(map(float, sizes))
        names = self.loss.weight.inputs
        try:
            with torch.no_grad():
                return tuple(
                    float(self.module(*(part[name].cpu() for name in names))) for part in parts
                )
        except Exception as error:  # whatever the model's code raises
            raise UsageError(
                f"what the loss is a mean over cannot be counted: {type(error).__name__}: {error}",
                hint=f"look at the values of {', '.join(names)}, such as labels out of range",
            ) from error

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what a state of the model says of its own state."""
        if self.module is None or self.loss is None or self.loss.weight is None:
            return
        names = self.loss.weight.state
        for own, tensor in self.module.state_dict().items():
            if names.get(own, own) in state:
                tensor.copy_(state[names.get(own, own)])

    def shares(self, weights: Sequence[float], total: float) -> tuple[float, ...]:
        """The weights of the micro-batches' losses in that of the mini-batch.

        Args:
            weights: as `weigh` gives them.
            total: their sum over the whole mini-batch.
        """
        loss = self.loss
        if loss is None or loss.reduction is Reduction.SUM:
            return tuple(weights)
        whole = divisor(loss, total)
        return tuple(divisor(loss, weight) / whole if whole else 0.0 for weight in weights)


def divisor(loss: LossSpec, weight: float) -> float:
    """What the loss of so much weight is divided by; a sum by 1."""
    if loss.reduction is Reduction.SUM:
        return 1.0
    return max(weight, loss.floor) + loss.offset
