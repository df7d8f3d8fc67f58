"""Gradients that a step has made, and that `backward()` of its loss gives to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .gradients import PipelineScaler


def refuse_deferred(scaler: PipelineScaler) -> None:
    """UsageError where gradients are scaled."""
    if scaler.is_enabled():
        raise UsageError(
            "in fp16 gradients are scaled, which backward() of a loss does not tell",
            hint="use step with pipe.scaler, or precision='bf16'",
        )


def deferred(step: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The loss of a step; what it adds to `.grad` is added by `backward()` of that loss instead.

    Args:
        step: runs it, and gives its loss.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = step()
        made = [(parameter, parameter.grad) for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    held = [(parameter, gradient) for parameter, gradient in made if gradient is not None]
    anchor = torch.zeros((), requires_grad=True)
    result: torch.Tensor = _Loss.apply(anchor, loss, held)  # type: ignore[no-untyped-call]  # torch
    return result


class _Loss(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        held: list[tuple[nn.Parameter, torch.Tensor]],
    ) -> torch.Tensor:
        ctx.held = held
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[None, None, None]:
        """Add the gradients, times the gradient of the loss."""
        if ctx.held is None:
            raise UsageError("backward() of a loss of a pipeline can be called once")
        with torch.no_grad():
            for parameter, gradient in ctx.held:
                gradient.mul_(factors[0].to(gradient.device))
                before = parameter.grad
                parameter.grad = gradient if before is None else before + gradient
        ctx.held = None
        return None, None, None
