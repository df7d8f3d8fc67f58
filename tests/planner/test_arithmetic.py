"""The arithmetic of a step that a plan tells, against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe_compiler as gc
from gpipe_compiler.cluster import BUILT_IN, GLOO, Cluster

WIDTH, LAYERS, SAMPLES = 64, 6, 32


@pytest.mark.parametrize("stages", [1, 2])
def test_products_of_a_model_at_the_peak_of_a_device(stages):
    """Two operations for each weight and sample, twice that in the backward but for the inputs."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(SAMPLES, WIDTH)
    graph = gc.trace(model, (x,), target=x, loss_fn=F.mse_loss)
    device = BUILT_IN["a100"].device
    plan = gc.plan(graph, stages=stages, microbatches=4, cluster=Cluster.of(device, GLOO))
    product = 2 * WIDTH * WIDTH * SAMPLES
    seconds = 4 * sum(stage.arithmetic_s for stage in plan.stages)
    assert seconds == pytest.approx((3 * LAYERS - 1) * product / device.flops)
