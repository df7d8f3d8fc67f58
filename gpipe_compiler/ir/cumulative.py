"""BatchNorm with a cumulative average, `momentum=None`.

Its forward computes 1 / num_batches_tracked in Python, which no tensor without numbers can give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

STAND_IN = 0.271828182845904523
"""A momentum that nobody chooses, so it is known where it turns up."""


@contextlib.contextmanager
def with_a_momentum(model: nn.Module) -> Iterator[None]:
    """Lets such layers have a number for a momentum, for a run that asks for no results."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.momentum is None
    ]
    for layer in layers:
        layer.momentum = STAND_IN
    try:
        yield
    finally:
        for layer in layers:
            layer.momentum = None
