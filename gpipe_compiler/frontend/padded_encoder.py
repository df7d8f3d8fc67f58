"""`nn.TransformerEncoder` as it evaluates padded sequences.

In eval mode and without gradients it packs them into nested tensors, which no trace follows, where
all are padded at their ends alone (`enable_nested_tensor`). What comes of it is what its layers
compute, but zero where there is padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensor

PACKS = "with enable_nested_tensor=False an nn.TransformerEncoder packs nothing"

_forward = nn.TransformerEncoder.forward

_NEVER = -1e4
"""What is added to the score of a position that the softmax is to give nothing, or less than it."""


def packed(at_ends: torch.Tensor, some: torch.Tensor | None = None) -> bool:
    """Whether sequences are packed.

    Args:
        at_ends: whether all are padded at their ends, if at all.
        some: whether they are, and some are padded: else it makes no difference.
    """
    return at_ends.is_meta or isinstance(at_ends, FakeTensor) or bool(at_ends)


def _evaluated(
    encoder: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """As torch's own `forward`, but for nested tensors."""
    padding = src_key_padding_mask
    if padding is None or mask is not None or src.dim() != 3 or not _packs(encoder):
        return _forward(encoder, src, mask, padding, is_causal)
    pad = padding if padding.dtype is torch.bool else padding != 0
    at_ends = (pad[:, 1:] | ~pad[:, :-1]).all()
    if padding.dtype is not torch.bool:
        at_ends = at_ends & (~pad | (padding <= _NEVER)).all()
    if not packed(at_ends, at_ends & pad.any()):
        return _forward(encoder, src, mask, padding, is_causal)
    norm = encoder.norm
    with mock.patch.dict(encoder._modules, norm=None):
        output = _forward(encoder, src, None, padding, is_causal)
    output = output.masked_fill(pad.unsqueeze(-1), 0.0)
    return output if norm is None else norm(output)


def _packs(encoder: nn.TransformerEncoder) -> bool:
    """Whether the settings of an encoder, and of torch, let it pack what is padded."""
    first: Any = encoder.layers[0]
    enabled = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return enabled and encoder.use_nested_tensor and not first.training


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Lets encoders compute what they evaluate to without nested tensors."""
    with mock.patch.object(nn.TransformerEncoder, "forward", _evaluated):
        yield
