"""Models that recompute activations, run so that every random op has a seed of its own."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.runtime.core.random import SeededRandom


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_sees_the_masks_of_forward(reentrant: bool) -> None:
    """The gradient of dropout is its mask, which the result tells too."""
    x = torch.ones(1000, requires_grad=True)

    with activations_kept(), SeededRandom(0, 0, 0, numbers=()):
        y = checkpoint(lambda t: F.dropout(t * t, 0.5), x, use_reentrant=reentrant)
    (gradient,) = torch.autograd.grad(y.sum(), x)

    assert torch.equal(gradient, 2 * y)
    assert 0 < int((y == 0).sum()) < 1000


def test_the_users_own_hooks_stay() -> None:
    """What the model itself does to what autograd saves goes on, inside a checkpoint too."""
    x = torch.ones(3, requires_grad=True)
    packed = []

    def inner(t: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda kept: packed.append(1) or kept, lambda kept: 2 * kept):
            return t * t

    with activations_kept():
        (gradient,) = torch.autograd.grad(checkpoint(inner, x, use_reentrant=False).sum(), x)

    assert packed
    assert torch.equal(gradient, torch.full((3,), 4.0))


def test_a_checkpoint_that_decorates_runs_once() -> None:
    try:
        decorate = checkpoint(use_reentrant=False)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} has no checkpoint that decorates")
    calls = []
    function = decorate(lambda t: calls.append(1) or t.sin())
    x = torch.ones(3, requires_grad=True)

    with activations_kept():
        torch.autograd.grad(function(x).sum(), x)

    assert calls == [1]
