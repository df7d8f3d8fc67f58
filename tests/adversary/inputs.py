"""Examples of a number of samples that the models of several files take; plain PyTorch only."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(samples: int) -> Tensor:
    return torch.randn(samples, 6)


def steps(samples: int) -> Tensor:
    return torch.randn(samples, 4, 6)


def classes(samples: int) -> Tensor:
    return torch.randint(3, (samples,))


def tokens(samples: int) -> Tensor:
    return torch.randint(3, (samples, 4))
