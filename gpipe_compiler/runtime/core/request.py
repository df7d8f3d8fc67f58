"""One run of the pipeline's programs: which work, on what, with which numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ..sizes import Sizes

Values = dict[str, torch.Tensor]
"""Tensors by the names of the pipeline's values."""


class RunRequest(Enum):
    """What a run is for."""

    TRAIN = "train"
    """Outputs, loss and gradients."""
    EVALUATE = "evaluate"
    """Outputs and loss, without gradients."""
    INFER = "infer"
    """Outputs alone; what serves only the loss is left out."""

    @property
    def makes_loss(self) -> bool:
        return self is not RunRequest.INFER


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What random ops depend on, beside their number in the model.

    Micro-batch m of this process's replica draws as micro-batch `first + m` of the mini-batch.
    """

    seed: int
    step: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One run of a program: what to compute, and what to keep of it.

    Attributes:
        inputs: the pipeline's inputs for every micro-batch; only the first device reads them.
        loss_weights: for each micro-batch, the weights of its loss's terms (mostly one) in those
            of the mini-batch; none where no loss is made. A term of weight 0 sends no gradient
            back, and may be nan: nothing in it counts. The one loss of a joint last stage stands
            first.
        vanished: the terms of the loss of which nothing in the mini-batch counts: their gradients
            are zeros, and not missing.
        kept: the values that the caller wants.
        loss_scale: gradients are those of the loss times this; the loss is told without it.
        held: by micro-batch, the inputs that stages of this process hold from an earlier call.
        handed_back: the inputs that are state which the model returns as it is.
    """

    work: RunRequest
    samples: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    inputs: Sequence[Mapping[str, torch.Tensor]]
    loss_weights: tuple[tuple[float, ...], ...]
    kept: frozenset[str]
    random: RandomKey
    vanished: frozenset[int] = frozenset()
    loss_scale: float = 1.0
    held: Sequence[Mapping[str, torch.Tensor]] = ()
    handed_back: frozenset[str] = frozenset()

    @property
    def microbatches(self) -> int:
        return len(self.samples)
