"""Models that recompute activations, run so that every random op has a seed of its own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.runtime.random import SeededRandom


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_sees_the_masks_of_forward(reentrant: bool) -> None:
    """The gradient of dropout is its mask, which the result tells too."""
    x = torch.ones(1000, requires_grad=True)

    with activations_kept(), SeededRandom(0, 0, 0, numbers=()):
        y = checkpoint(lambda t: F.dropout(t * t, 0.5), x, use_reentrant=reentrant)
    (gradient,) = torch.autograd.grad(y.sum(), x)

    assert torch.equal(gradient, 2 * y)
    assert 0 < int((y == 0).sum()) < 1000
