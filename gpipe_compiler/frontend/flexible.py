"""Flex attention in a trace: the attention that torch itself computes where it does not compile.

`flex_attention` is one operator with the user's functions inside, and compiles itself when it is
called. Traced in its place is what it computes where nothing compiles it, in ordinary operators.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

_MODULE = "torch.nn.attention.flex_attention"
_NO_MASK = "_create_empty_block_mask"
_OPERATOR = "flex_attention_hop"
_COMPILING = "setup_compilation_env"
_SWITCH = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"

_NAMES = (_NO_MASK, _OPERATOR, _COMPILING, _SWITCH)


@contextlib.contextmanager
def in_the_open() -> Iterator[None]:
    """Lets flex attention compute in ordinary operators, and make no mask that masks nothing."""
    module = sys.modules.get(_MODULE)
    if module is None or not all(hasattr(module, name) for name in _NAMES):
        yield
        return
    original = getattr(module, _NO_MASK)

    def outside_of_the_trace(*args: torch.Tensor) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return original(*args)

    with (
        mock.patch.object(module, _SWITCH, True),
        mock.patch.object(module, _OPERATOR, _attend),
        mock.patch.object(module, _COMPILING, contextlib.nullcontext),
        mock.patch.object(module, _NO_MASK, outside_of_the_trace),
    ):
        yield


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Sequence[Any],
    scale: float,
    _options: object,
    score_buffers: Sequence[torch.Tensor] = (),
    mask_buffers: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the logarithms to base 2 of the sums and maxima of the scores.

    The user's functions are given all places at once, where torch maps them over single ones.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        query, key, value = (tensor.to(lower) for tensor in (query, key, value))
    with torch.autocast(kind, enabled=False):
        if query.size(1) != key.size(1):
            key, value = (
                tensor.repeat_interleave(query.size(1) // key.size(1), dim=1)
                for tensor in (key, value)
            )
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = query.to(exact) @ key.to(exact).transpose(-2, -1) * scale
        places = [
            torch.arange(size, device=query.device).view([-1 if d == own else 1 for d in range(4)])
            for own, size in enumerate(scores.shape)
        ]
        scores = torch.where(
            block_mask[-1](*places, *mask_buffers),
            score_mod(scores, *places, *score_buffers),
            -torch.inf,
        )
        weights = torch._safe_softmax(scores, dim=-1)
        out = weights.to(query.dtype) @ value.to(query.dtype)
        return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)
