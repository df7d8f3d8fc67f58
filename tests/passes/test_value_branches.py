"""Which conditions hold of a batch where they hold of its micro-batches, against both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpipe_compiler as gpc
from gpipe_compiler.passes.batch_gates import first_of_batch
from gpipe_compiler.passes.shapes import annotate

FOLLOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: (x < 100).all(),
    "any": lambda x: (x > 100).any(),
    "largest": lambda x: x.max() > 1e3,
    "least": lambda x: x.amin() < -1e3,
    "mean": lambda x: x.mean() > 1e3,
    "none": lambda x: (x > 100).sum() == 0,
    "finite": lambda x: torch.isfinite(x.sum()),
    "both": lambda x: (x < 100).all() & torch.logical_not((x < -100).any()),
    "softened": lambda x: x.softmax(-1).max() > 2,
}
NOT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum() > 1e3,
    "count": lambda x: (x < 100).sum() > 1000,
    "norm": lambda x: x.norm() > 1e3,
    "equal": lambda x: x.max() == 1e3,
    "either": lambda x: (x > 100).any() & (x < -100).any(),
    "centred": lambda x: (x - x.mean(0)).max() > 1e3,
    "deviation": lambda x: x.std() > 1e3,
    "two": lambda x: x.max() > x.min() + 1e3,
}


class Asking(nn.Module):
    def __init__(self, condition: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.condition, self.layer = condition, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.condition(x):
            x = x * 2
        return self.layer(x)


def traced(condition: Callable[[Tensor], Tensor]) -> gpc.Graph:
    torch.manual_seed(0)
    return annotate(gpc.trace(Asking(condition), torch.randn(6, 4), training=False), 6)


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_is_asked_of_every_sample_follows(name: str) -> None:
    graph = traced(FOLLOWS[name])
    assert first_of_batch(graph) is None
    condition = FOLLOWS[name]
    for seed in range(200):
        torch.manual_seed(seed)
        x = torch.randn(6, 4) * 10.0 ** torch.randint(5, (6, 1))
        parts = {bool(condition(part)) for part in x.split(2)}
        assert len(parts) == 2 or parts == {bool(condition(x))}


@pytest.mark.parametrize("name", NOT)
def test_what_is_taken_over_the_batch_does_not(name: str) -> None:
    op = first_of_batch(traced(NOT[name]))
    assert op is not None
    assert op.source is not None
    assert op.source.code == "if self.condition(x):"
