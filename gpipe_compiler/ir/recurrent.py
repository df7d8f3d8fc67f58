"""Recurrent layers on tensors without numbers, in a time that does not go with their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def recurrent_forms() -> Iterator[None]:
    """Around tensors without numbers: recurrent layers run one step, and give its form for all.

    The host computes all but LSTMs step by step, each of them some ten kernels.
    """
    with contextlib.ExitStack() as around:
        for name in ("gru", "lstm", "rnn_relu", "rnn_tanh"):
            own = getattr(torch._VF, name)
            around.enter_context(mock.patch.object(torch._VF, name, _by_one_step(own)))
        yield


def _by_one_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    def run(taken: torch.Tensor, state: Any, weights: Any, *others: Any) -> Any:
        if not isinstance(weights, list):  # of a packed sequence: the states
            return layer(taken, state, weights, *others)
        dim = 1 if others[-1] else 0
        made, *states = layer(taken.narrow(dim, 0, 1), state, weights, *others)
        steps = made.transpose(0, dim).expand(taken.shape[dim], -1, -1).contiguous()
        return steps.transpose(0, dim), *states

    return run
