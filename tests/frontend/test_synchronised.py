"""SyncBatchNorm is traced as the BatchNorm that it is in one process; compared with models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace, trace_whole
from gpipe_compiler.options import LossChoice

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def test_a_batchnorm_is_seen() -> None:
    """Which also means that the graph does what the model does."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4, momentum=0.3))

    graph = trace_whole(
        Subject("m", model, (torch.randn(4, 3, 5, 5),), loss=LossChoice.SUM_OF_SQUARES)
    )

    assert {spec.cls for spec in graph.modules.values()} <= {nn.Conv2d, nn.BatchNorm2d}
    assert type(model[1]) is nn.SyncBatchNorm
    assert not model[1]._forward_pre_hooks


@pytest.mark.parametrize("dimensions", KINDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_kind_follows_from_what_the_layer_is_given(dimensions: int, device: str) -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.ReLU()).to(device)
    batch = torch.randn((4, 3, 2, 2, 2)[:dimensions], device=device)

    graph = trace(Subject("m", model, (batch,), loss=LossChoice.SUM_OF_SQUARES))

    assert graph.modules["0"].cls is KINDS[dimensions]


class Twice(nn.Module):
    """Gives one layer images and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(images).mean((2, 3)))


def test_a_layer_of_two_kinds_is_traced_into() -> None:
    graph = trace(Subject("m", Twice(), (torch.randn(4, 3, 2, 2),), loss=LossChoice.SUM_OF_SQUARES))

    assert not graph.modules
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= graph.state.keys()
