"""Which numbers a model compares places in the batch with, and which other numbers are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace_subject
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.passes.batch_rules import all_rules

Rule = Callable[[Tensor], Tensor]


def masked(x: Tensor) -> Tensor:
    return x * (torch.arange(len(x)) < 500)[:, None]


def in_groups(x: Tensor) -> Tensor:
    return x * (1 + torch.arange(len(x)) // 200)[:, None]


def sliced(x: Tensor) -> Tensor:
    return torch.cat([x[:300] * 2, x[300:]])


def cleared(x: Tensor) -> Tensor:
    y = x.clone()
    y[600:] = 0
    return y


def bounded(x: Tensor) -> Tensor:
    return x * (min(len(x), 700) / len(x))


def convolved(x: Tensor) -> Tensor:
    """From 16 samples on, torch runs another kernel on some processors."""
    wide = x[:, None, None, :].expand(-1, 64, 56, -1)
    return torch.nn.functional.conv2d(wide, torch.ones(64, 64, 1, 1)).sum((1, 2))


def columns(x: Tensor) -> Tensor:
    """Along another dimension than the batch."""
    return x.repeat(1, 300)[:, 250:] * (torch.arange(1200 - 250) < 800)


def values(x: Tensor) -> Tensor:
    return x.clamp(max=900.0) * (x > -800)


def filled(x: Tensor) -> Tensor:
    """A number that stands for a word, and not for a place."""
    words = torch.full((len(x),), 50256)
    return x * (words == 50256)[:, None] + x.new_full((len(x), 4), 4000.0)


@pytest.mark.parametrize(
    ("rule", "number"),
    [
        *((masked, 500), (in_groups, 200), (sliced, 300), (cleared, 600), (bounded, 700)),
        *((convolved, 0), (columns, 0), (values, 0), (filled, 0)),
    ],
)
def test_the_largest_number(rule: Rule, number: int) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rule(x)

    graph = trace_subject(Subject("s", Model(), (torch.randn(8, 4),), training=False))

    rules = all_rules(graph)
    assert max((rule.samples - 1 for rule in rules), default=0) == number
