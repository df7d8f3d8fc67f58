"""What a caching allocator reserves over steps of a device's program, by hand."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import Cluster, Device, Link, built_in
from gpipe_compiler.cluster.catalogue import DEFAULT_HOST
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import DeviceMemory
from gpipe_compiler.report.text import format_plan
from gpipe_compiler.runtime.spec import OptimizerKind

MIB = 2**20
WIDTH = 1024
WEIGHT = WIDTH * WIDTH * 4
BARE = dataclasses.replace(built_in("A100").device, workspace=0)


class Chain(nn.Module):
    """Layers of 4 MiB of weights each, over rows of 4 KiB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def planned(
    device: Device, layers: int, samples: int, *, microbatches: int = 1, **policy: OptimizerKind
) -> Plan:
    graph = gpc.trace(Chain(layers), torch.randn(samples, WIDTH), loss=LossChoice.SUM_OF_SQUARES)
    cluster = Cluster.of(device, Link(1e12, 0.0))
    return gpc.plan(
        graph, stages=1, microbatches=microbatches, cluster=cluster, policy=Policy(**policy)
    )


def memory_on(device: Device, layers: int, samples: int, **policy: OptimizerKind) -> DeviceMemory:
    return planned(device, layers, samples, **policy).prediction.memory[0]


def test_tensors_under_ten_mebibytes_share_segments_of_twenty():
    """One layer: its weight and its gradient of 4 MiB each; activations of a row fit in one small
    segment of 2 MiB."""
    found = memory_on(BARE, 1, 1)

    assert found.reserved == (20 + 2) * MIB


def test_what_the_optimizer_remembers_is_there_in_the_second_step():
    """Weight, gradient, two moments, and the temporary of the step, of 4 MiB each, are five of
    those that a segment of 20 MiB holds."""
    found = memory_on(BARE, 1, 1, optimizer=OptimizerKind.ADAMW)

    assert found.reserved == (20 + 2) * MIB
    assert memory_on(BARE, 2, 1, optimizer=OptimizerKind.ADAMW).reserved == (40 + 2) * MIB


def test_workspaces_are_segments_of_their_own():
    with_workspaces = dataclasses.replace(BARE, workspace=32 * MIB)

    assert memory_on(with_workspaces, 1, 1).reserved == (20 + 2 + 64) * MIB


def test_no_allocator_reserves_on_a_host():
    assert memory_on(DEFAULT_HOST, 1, 1).reserved == 0


@settings(max_examples=6)  # each is traced and planned
@given(layers=st.integers(1, 4), samples=st.integers(1, 3000), microbatches=st.sampled_from([1, 2]))
def test_no_less_is_reserved_than_is_live(layers: int, samples: int, microbatches: int) -> None:
    plan = planned(BARE, layers, samples * microbatches, microbatches=microbatches)
    (found,) = plan.prediction.memory

    assert found.reserved >= found.peak
    assert found.reserved % (2 * MIB) == 0


def test_it_is_printed_and_goes_to_json_and_back():
    plan = planned(BARE, 1, 1)

    assert "of tensors, 22 MiB reserved for them" in format_plan(plan)
    assert Plan.from_json(plan.to_json()).prediction == plan.prediction
    assert "reserved" not in format_plan(planned(DEFAULT_HOST, 1, 1))
