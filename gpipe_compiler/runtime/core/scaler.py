"""Scaling of fp16 gradients, where all ranks skip a step together or none does.

torch.amp.GradScaler sees the gradients of one process. Here a gradient that overflows on one rank
lets every rank (and every replica) skip the step and halve the scale, as it would in the plain
model, where all gradients are in one place. Torch's own scaler for shards,
torch.distributed.fsdp.sharded_grad_scaler, does so by a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..errors import UsageError

OverRanks = Callable[[torch.Tensor, str], torch.Tensor]
"""A small tensor summed over all ranks, the same bits on each; with words for who waits in vain."""


def alone(tensor: torch.Tensor, _what: str) -> torch.Tensor:
    """What `OverRanks` comes to for a single process."""
    return tensor


class PipelineScaler(torch.amp.GradScaler):
    """A GradScaler whose decisions are those of all ranks; they all make the same calls.

    Used as torch's own, but for `scale`: the pipeline scales its losses itself.

        pipe.step(inputs, target)
        pipe.scaler.unscale_(optimizer)     # only before clipping
        pipe.clip_grad_norm_(1.0)
        pipe.scaler.step(optimizer)
        pipe.scaler.update()

    Disabled it does nothing but `optimizer.step()`, so the same loop serves every precision.

    Args:
        device: where the scale is kept.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool, over_ranks: OverRanks = alone
    ) -> None:
        super().__init__(device.type, enabled=enabled)
        self._over_ranks = over_ranks
        if self._enabled:
            # torch waits for the first call of `scale`, which nobody makes here.
            self._lazy_init_scale_growth_tracker(device)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Every way to a step leads through here, once for each optimizer."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here = torch.stack(
            [found_inf, *(one.to(found_inf.device) for one in found.values())]
        ).amax()
        anywhere = self._over_ranks(here, "whether gradients have overflowed")
        return {found_inf.device: (anywhere > 0).to(found_inf)}


def check_weights(modules: Mapping[int, nn.Module]) -> None:
    """Refuse weights whose gradients are in fp16 themselves: they cannot be unscaled.

    Raises:
        UsageError: naming one of them.
    """
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise UsageError(
                    f"{name} of stage {stage} is fp16 itself, so its gradients are too, and no "
                    "gradient scaler takes those",
                    hint="keep the weights in fp32 under --precision fp16, or train in fp32",
                )
