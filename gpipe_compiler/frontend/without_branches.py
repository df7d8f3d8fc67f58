"""Methods of torch that branch on the values of tensors: without these branches, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import swa_utils

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.locate import calling_line


@contextlib.contextmanager
def without_branches() -> Iterator[None]:
    """Lets a trace follow averages of weights; refuses the adaptive softmax."""
    averages = mock.patch.object(swa_utils.AveragedModel, "update_parameters", _average)
    with averages, mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _refuse):
        yield


@torch.no_grad()
def _average(averaged: swa_utils.AveragedModel, model: nn.Module) -> None:
    """As torch's own, which asks how many models it has averaged: the first one is copied."""
    held: Any = averaged
    own: list[torch.Tensor] = list(held.parameters())
    theirs: list[torch.Tensor] = list(model.parameters())
    if held.use_buffers:
        own = [*held.module.parameters(), *held.module.buffers()]
        theirs += model.buffers()
    pairs = [
        (mean.detach(), weight.detach().to(mean.device))
        for mean, weight in zip(own, theirs, strict=False)
    ]
    first = held.n_averaged == 0
    if held.multi_avg_fn is not None:
        for dtype in dict.fromkeys(mean.dtype for mean, _ in pairs):
            means, weights = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
            held.multi_avg_fn(list(means), list(weights), held.n_averaged)
        for mean, weight in pairs:
            mean.copy_(torch.where(first, weight, mean))
    else:
        average = held.avg_fn or swa_utils.get_swa_avg_fn()  # type: ignore[no-untyped-call]
        for mean, weight in pairs:
            mean.copy_(torch.where(first, weight, average(mean, weight, held.n_averaged)))
    if not held.use_buffers:
        for copied, buffer in zip(held.module.buffers(), model.buffers(), strict=True):
            copied.detach().copy_(buffer.detach().to(copied.device))
    held.n_averaged += 1


def _refuse(layer: nn.Module, *_: object) -> None:
    raise TraceError(
        f"{type(layer).__name__} computes the clusters alone in which a target is: weights of the "
        "others get no gradient, and which these are is not known before the step",
        location=calling_line(),
        hint="take the loss of all clusters, which is the same number: "
        "F.nll_loss(layer.log_prob(hidden), target)",
    )
