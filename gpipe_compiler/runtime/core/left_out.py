"""What is passed on where a stage leaves a layer out."""

from __future__ import annotations

import torch
from torch.overrides import handle_torch_function, has_torch_function


def passed_on(given: torch.Tensor, draws: int = 0, *, gradient: bool = False) -> torch.Tensor:
    """What a layer was given, in memory of its own as what it makes would be.

    Args:
        draws: how many random ops the layer would have run: those that follow are numbered as if it
            had (`random.OverDraws`).
        gradient: whether what the layer makes needs a gradient, be it for its weights alone.
    """
    if has_torch_function((given,)):
        made: torch.Tensor = handle_torch_function(
            passed_on, (given,), given, draws, gradient=gradient
        )
        return made
    if gradient and torch.is_grad_enabled() and not given.requires_grad:
        given = given.detach().requires_grad_()
    return given.clone()
