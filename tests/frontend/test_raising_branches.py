"""What a model checks of its values, and only raises for, is no branch on the data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.errors import TraceError


class Checked(nn.Module):
    """Layers between which something is asked of the values."""

    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.check = nn.Linear(4, 4), nn.Linear(4, 3), check

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.check(self.first(x).tanh()))


def of_both(h: Tensor) -> Tensor:
    if h is not None and h.max() > 2:
        name = "h"
        raise ValueError(f"{name} is {h.max()}")
    return h


def asserted(h: Tensor) -> Tensor:
    assert (h > -2).all(), "out of range"
    if not ((h < 2).all() and h.isfinite().all()):
        raise ValueError
    return h


def by_a_number(h: Tensor) -> Tensor:
    if h.abs().amax().item() > 2:
        raise ValueError("too large")
    return h


def otherwise(h: Tensor) -> Tensor:
    if not (h > 2).any():
        h = h * 2
    else:
        raise ValueError("too large")
    return h


def deciding(h: Tensor) -> Tensor:
    if (h > 0.1).any():
        h = h * 2
    return h


def caught(h: Tensor) -> Tensor:
    try:
        of_both(h)
    except ValueError:
        h = h / 2
    return h


def suppressed(h: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        of_both(h)
        h = h * 2
    return h


def either(h: Tensor) -> Tensor:
    if (h.sum() if h.sum() > 0 else h.max()) > 99:
        raise ValueError("too large")
    return h


def differing(h: Tensor) -> Tensor:
    if h.isnan().any() or not (h > -2).all():
        raise ValueError
    return h


@pytest.mark.parametrize("check", [of_both, asserted, by_a_number, otherwise])
def test_a_branch_that_only_raises_is_passed(check: Callable[[Tensor], Tensor]) -> None:
    model, x = Checked(check), torch.randn(4, 4)
    assert len(trace(model, x, training=False).ops) <= 4


@pytest.mark.parametrize("check", [deciding, caught, suppressed, either, differing])
def test_a_branch_that_decides_is_refused(check: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="decides by the values of a tensor"):
        trace(Checked(check), torch.randn(4, 4), training=False)
