"""What is said of errors of torch whose cause is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_compiler import trace
from gpipe_compiler.errors import ModelError
from tests.helpers.processors import lstm_in_16_bits


class Lowered(nn.Module):
    """An LSTM that its model has compute in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)[0]


@pytest.mark.skipif(lstm_in_16_bits(), reason="this processor has the kernel")
def test_an_lstm_in_16_bits_without_its_kernel() -> None:
    with pytest.raises(ModelError) as raised:
        trace(Lowered(), torch.zeros(4, 3, 4), training=False)

    assert "needs AVX-512" in str(raised.value)
    assert "--precision fp32" in str(raised.value)
