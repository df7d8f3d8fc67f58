"""What a plan's devices do without a pipeline: against plans of one stage, and by hand."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import CompileOptions, LossChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.stages import WholeModel
from gpipe_compiler.targets.planning import plan_as_asked, planner_of

WIDTH, SAMPLES, LAYERS = 64, 8, 4
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
FLAT = Device("flat", 1e9, 1e18, 1 << 34, 0.0)
LINK = Link(1e6, 0.0)


@cache
def traced(*, normed: bool = False) -> Graph:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    if normed:
        layers.insert(1, nn.BatchNorm1d(WIDTH))
    model = nn.Sequential(*layers)
    return trace(model, (torch.randn(SAMPLES, WIDTH),), loss=LossChoice.SUM_OF_SQUARES)


def asked(graph: Graph, cluster: Cluster, **changed: object) -> Plan:
    options = CompileOptions(stages=2, microbatches=4, cluster=cluster)
    options = dataclasses.replace(options, **changed)
    return plan_as_asked(planner_of(graph, options), options, lambda _: None)[0]


def test_one_device_is_the_plan_of_one_stage():
    found = asked(traced(), Cluster.of(FLAT, LINK))
    alone = plan(traced(), stages=1, microbatches=1, cluster=Cluster.of(FLAT, LINK))

    one = found.whole[0]
    assert one.devices == 1
    assert one.step_s == pytest.approx(alone.prediction.step_s)
    assert (one.peak_bytes,) == alone.prediction.device_bytes
    assert one.memory == FLAT.memory
    assert one.possible


def test_replicas_share_the_samples_and_reduce_the_gradients():
    """Two devices each compute half, and then send and receive all gradients once."""
    found = asked(traced(), Cluster.of(FLAT, LINK))

    one, two = found.whole
    assert two.devices == 2
    assert two.step_s == pytest.approx(one.step_s / 2 + PARAMETER_BYTES / LINK.bandwidth, rel=1e-3)


def test_the_slowest_link_of_the_ring_reduces_the_gradients():
    slow = Link(LINK.bandwidth / 10, 0.0)
    hosts = Cluster((FLAT,) * 4, LINK, network=slow, hosts=(0, 0, 1, 1))
    found = asked(traced(), hosts, stages=4, microbatches=2)
    one, four = found.whole

    # A ring of four moves twice three quarters of the gradients over each link.
    assert four.step_s == pytest.approx(
        one.step_s / 4 + 1.5 * PARAMETER_BYTES / slow.bandwidth, rel=1e-3
    )


def test_replicas_on_unequal_devices_take_as_long_as_the_slowest():
    slow = dataclasses.replace(FLAT, name="slow", flops=FLAT.flops / 4)
    found = asked(traced(), Cluster((FLAT, slow), Link(1e18, 0.0)))
    quick = asked(traced(), Cluster((FLAT, FLAT), Link(1e18, 0.0)))

    assert found.whole[0].step_s == pytest.approx(quick.whole[0].step_s)
    assert found.whole[1].step_s == pytest.approx(4 * quick.whole[1].step_s)


def test_processes_that_share_memory_have_less_each_the_more_they_are():
    pooled = dataclasses.replace(Cluster.of(FLAT, LINK), pooled=True, places=1)
    one, two = asked(traced(), pooled).whole

    assert (one.memory, two.memory) == (FLAT.memory, FLAT.memory // 2)
    # In one place to compute they take turns.
    assert two.here_s >= one.here_s * (1 - 1e-9)


def test_what_does_not_fit_is_said_to():
    little = dataclasses.replace(FLAT, memory=3 * PARAMETER_BYTES // 2)
    found = asked(traced(), Cluster.of(little, LINK))

    assert found.fits
    assert not any(whole.possible for whole in found.whole)
    assert all(whole.peak_bytes > whole.memory for whole in found.whole)


def test_a_batch_that_replicas_cannot_share_is_a_problem_of_theirs_alone():
    found = asked(traced(), Cluster.of(FLAT, LINK), stages=3)
    one, three = found.whole

    assert one.possible
    assert three.devices == 3
    assert "does not split" in three.problem
    assert not three.possible


def test_a_model_that_cannot_train_on_one_sample_is_a_problem_of_replicas():
    found = asked(traced(normed=True), Cluster.of(FLAT, LINK), data_parallel=4, microbatches=1)
    one, eight = found.whole

    assert (one.devices, eight.devices) == (1, 8)
    assert one.possible
    assert eight.problem


def test_one_device_is_compared_with_nothing():
    assert asked(traced(), Cluster.of(FLAT, LINK), stages=1).whole == ()


def test_it_goes_to_json_and_back():
    found = asked(traced(), Cluster.of(FLAT, LINK))

    assert Plan.from_json(found.to_json()).whole == found.whole
    assert all(isinstance(whole, WholeModel) for whole in found.whole)
