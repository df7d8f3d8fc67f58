"""What is said of errors of torch whose cause is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_compiler import trace
from gpipe_compiler.errors import ModelError, TraceError
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


def _compute_mask_indices(lengths: torch.Tensor) -> torch.Tensor:
    """Like that of transformers: which places are masked, by numbers and not by tensors."""
    kept = [[place % 2 < int(length * 0.5) for place in range(3)] for length in lengths]
    return torch.tensor(kept)


class Masked(nn.Module):
    """Masks spans of its input, as long as the lengths of a batch say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.layer(x).masked_fill(_compute_mask_indices(lengths), 0.0)


def test_spans_that_are_masked_on_the_host() -> None:
    with pytest.raises(TraceError) as raised:
        trace(Masked(), (torch.zeros(4, 3), torch.tensor([1, 2, 3, 3])), training=False)

    assert "int(length * 0.5)" in str(raised.value)
    assert "as SpecAugment does" in str(raised.value)
    assert "mask_time_prob=0.0" in str(raised.value)


class Hit(nn.Module):
    """Goes over those experts alone that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(self.gate(x).argmax(-1), 2)
        made = torch.zeros_like(x)
        for number in chosen.sum(0).nonzero():
            (rows,) = torch.where(chosen.T[number].squeeze(0))
            made = made.index_add(0, rows, x[rows] @ self.experts[number].squeeze(0))
        return made


def test_a_loop_over_the_experts_that_were_hit() -> None:
    with pytest.raises(TraceError) as raised:
        trace(Hit(), torch.randn(4, 3), training=False)

    assert "at `for number in chosen.sum(0).nonzero():`: how many rounds" in str(raised.value)
    assert "for number in range(self.num_experts)" in str(raised.value)


class Counting(nn.Module):
    """Splits by counts that it reads as numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = nn.functional.one_hot((x[:, 0] > 0).long(), 2).sum(0).tolist()
        return torch.cat(x.split(counts))


def test_numbers_that_are_read_on_meta() -> None:
    with pytest.raises(ModelError, match=r"raises \w+ on the example inputs") as raised:
        trace(Counting(), torch.empty(4, 3, device="meta"), training=False)

    assert raised.value.location is not None
    assert ".sum(0).tolist()" in raised.value.location.code
    assert "build it on the CPU" in str(raised.value)
