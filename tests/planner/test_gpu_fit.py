"""What fits a GPU: the memory of the card, less what is no tensor's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import Cluster, Device, Link, built_in
from gpipe_compiler.cluster.catalogue import BUILT_IN, DEFAULT_HOST, KEPT_FREE
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import CompileOptions, LossChoice, Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.memory_advice import DoesNotFitError
from gpipe_compiler.targets.planning import plan_as_asked, planner_of

WIDTH, SAMPLES, LAYERS = 512, 2048, 6
H100 = built_in("H100").device


@pytest.fixture(scope="module")
def graph() -> Graph:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    x = torch.randn(SAMPLES, WIDTH)
    return gpc.trace(nn.Sequential(*layers), x, loss=LossChoice.SUM_OF_SQUARES)


def planned(graph: Graph, device: Device, **policy: RematChoice) -> Plan:
    cluster = Cluster.of(device, Link(1e12, 0.0))
    return gpc.plan(graph, stages=2, microbatches=2, cluster=cluster, policy=Policy(**policy))


@given(memory=st.integers(1, 10**12), kept=st.integers(0, 10**10))
def test_what_there_is_room_for_is_all_that_fits(memory: int, kept: int) -> None:
    device = dataclasses.replace(H100, memory=memory, kept_free=kept)

    assert device.room >= 0
    assert not device.room or device.needed(device.room) <= memory
    assert device.needed(device.room + 2) > memory


def test_a_gpu_holds_what_is_reserved_a_margin_and_what_is_kept_free(graph: Graph):
    plan = planned(graph, H100)

    for needed, memory in zip(plan.prediction.device_bytes, plan.prediction.memory, strict=True):
        assert needed == pytest.approx(1.02 * memory.reserved + KEPT_FREE, abs=1)
        assert memory.reserved >= memory.peak


@pytest.mark.parametrize("device", [DEFAULT_HOST, Device("mine", 1e12, 1e12, 2**34, 1e-6)])
def test_other_devices_hold_tensors_alone(graph: Graph, device: Device) -> None:
    plan = planned(graph, device)

    assert plan.prediction.device_bytes == tuple(m.peak for m in plan.prediction.memory)


def test_a_plan_fits_up_to_the_last_byte(graph: Graph):
    needed = max(planned(graph, H100).prediction.device_bytes)

    assert planned(graph, dataclasses.replace(H100, memory=needed)).fits
    assert not planned(graph, dataclasses.replace(H100, memory=needed - 1)).fits


def test_stages_recompute_where_only_the_rest_of_the_card_is_theirs(graph: Graph):
    """Between what stages need that recompute and what others do: of the card's memory, all but
    what is kept free, they could hold everything live, but not what is reserved for it."""
    kept, again = (
        max(planned(graph, H100, remat=remat).prediction.device_bytes)
        for remat in (RematChoice.NONE, RematChoice.FULL)
    )
    assert again < kept
    plan = planned(
        graph, dataclasses.replace(H100, memory=(kept + again) // 2), remat=RematChoice.AUTO
    )

    assert plan.fits
    for memory, device in zip(plan.prediction.memory, plan.devices, strict=True):
        assert memory.reserved <= device.memory - device.kept_free
    assert any(not stage.written for stage in plan.stages)


def test_what_does_not_fit_says_what_is_no_tensor(graph: Graph):
    cluster = Cluster.of(H100, Link(1e12, 0.0)).with_memory(10**9)
    options = CompileOptions(stages=2, microbatches=2, cluster=cluster, must_fit=True)

    with pytest.raises(DoesNotFitError, match="for PyTorch's allocator and CUDA"):
        plan_as_asked(planner_of(graph, options), options, lambda _: None)


def test_all_gpus_keep_some_of_their_memory_free():
    assert {card.device.kept_free for card in BUILT_IN.values()} == {KEPT_FREE}
    assert all(card.device.workspace for card in BUILT_IN.values())
