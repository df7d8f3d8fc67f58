"""What torch has kernels for on the processor that tests run on."""

from __future__ import annotations

import torch
from torch import nn


def lstm_in_16_bits() -> bool:
    """Whether an LSTM computes in bf16: oneDNN needs AVX-512 for it, and torch does not look."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.zeros(1, 1, 4))
    except RuntimeError:
        return False
    return True
