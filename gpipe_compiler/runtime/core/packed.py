"""Recurrent layers of torch that pack padded sequences by their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class _Packed(nn.RNNBase):
    """A layer that reads no padding where it is told the lengths of its sequences.

    What it gives for padding is 0, and the last states are those of the last steps that are none.
    """

    def forward(
        self,
        *given: Any,
        lengths: torch.Tensor | None = None,
        enforce_sorted: bool = True,
        **named: Any,
    ) -> Any:
        if lengths is None:
            return super().forward(*given, **named)
        padded, *states = given
        steps = padded.shape[1 if self.batch_first else 0]
        packed = pack_padded_sequence(padded, lengths.cpu(), self.batch_first, enforce_sorted)
        output, ended = super().forward(packed, *states, **named)
        output, _ = pad_packed_sequence(output, self.batch_first, total_length=steps)
        return output, ended


class PackedRNN(_Packed, nn.RNN):
    """nn.RNN with `lengths=`."""


class PackedLSTM(_Packed, nn.LSTM):
    """nn.LSTM with `lengths=`."""


class PackedGRU(_Packed, nn.GRU):
    """nn.GRU with `lengths=`."""


PACKED: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.RNN: PackedRNN, nn.LSTM: PackedLSTM, nn.GRU: PackedGRU}
)
"""By torch's layers, those that pack."""
