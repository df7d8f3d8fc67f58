"""Floating-point operations of kernels that torch's own counter does not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

_aten = torch.ops.aten


def _rnn_layer_flops(x: Any, weight: Any, recurrent: Any, *_: Any, out_val: Any) -> int:
    """Both products of every time step of an LSTM or GRU layer: of the input, of the state."""
    steps = x.shape[0] * x.shape[1]
    return int(2 * steps * (weight.numel() + recurrent.numel()))


def _rnn_layer_backward_flops(*args: Any, out_val: Any) -> int:
    return 2 * _rnn_layer_flops(*args, out_val=out_val)


def _convolution_backward_flops(
    gradient: Any, x: Any, weight: Any, *further: Any, out_val: Any
) -> int:
    """For either gradient as many as forward: torch counts that of grouped weights as dense."""
    transposed, needed = further[4], further[7]
    places = x if transposed else gradient
    once = 2 * x.shape[0] * math.prod(places.shape[2:]) * weight.numel()
    return int(once * sum(map(bool, needed[:2])))


def _attention_flops(queries: int, formula: Callable[..., int]) -> Callable[..., int]:
    """torch's formula, whose keys and values may have fewer heads than its queries.

    Args:
        queries: the position of the queries among the arguments, before keys and values.
        formula: before torch 2.13 it knows equal numbers of heads alone.
    """

    def flops(*args: Any, **kwargs: Any) -> int:
        heads = args[queries].shape[1]
        repeated = [
            torch.Size((tensor.shape[0], heads, *tensor.shape[2:]))
            for tensor in args[queries + 1 : queries + 3]
        ]
        return formula(*args[: queries + 1], *repeated, *args[queries + 3 :], **kwargs)

    return flops


FURTHER_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
        ),
        _attention_flops(0, sdpa_flop),
    ),
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _aten._scaled_dot_product_flash_attention_backward,
            _aten._scaled_dot_product_efficient_attention_backward,
            _aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _attention_flops(1, sdpa_backward_flop),
    ),
    _aten.convolution_backward: _convolution_backward_flops,
    _aten.mkldnn_rnn_layer: _rnn_layer_flops,
    _aten.mkldnn_rnn_layer_backward: _rnn_layer_backward_flops,
}
"""Kernels that torch's own flop counter does not know, or counts otherwise than they run."""
