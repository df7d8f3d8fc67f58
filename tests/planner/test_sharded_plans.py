"""Replicas that divide weights and optimizer: what a plan says of memory and time, by hand."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import CompileOptions, LossChoice, Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import Category
from gpipe_compiler.report.facts import headline
from gpipe_compiler.runtime.spec import OptimizerKind, WeightSharding

WIDTH, SAMPLES, LAYERS = 64, 16, 4
TRAINED = WIDTH * WIDTH * 4
"""Bytes of a layer."""

FLAT = Device("flat", 1e9, 1e9, 1 << 34, 0.0)
SLOW = Link(1e6, 0.0)


@cache
def traced() -> Graph:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return trace(
        nn.Sequential(*layers), (torch.randn(SAMPLES, WIDTH),), loss=LossChoice.SUM_OF_SQUARES
    )


def planned(replicas: int, sharding: WeightSharding = WeightSharding.NONE) -> Plan:
    policy = Policy(data_parallel=replicas, sharding=sharding, optimizer=OptimizerKind.ADAMW)
    return plan(traced(), stages=2, microbatches=2, cluster=Cluster.of(FLAT, SLOW), policy=policy)


@pytest.mark.parametrize("replicas", [2, 4])
def test_memory_between_steps_is_divided(replicas):
    """Rows of two layers beside the whole ones, and of what Adam remembers of them."""
    whole, divided = planned(replicas), planned(replicas, WeightSharding.OPTIMIZER)
    own = 2 * TRAINED

    for one, other in zip(whole.prediction.memory, divided.prediction.memory, strict=True):
        assert other.of(Category.WEIGHTS) == one.of(Category.WEIGHTS) + own // replicas
        remembered = one.of(Category.OPTIMIZER) - other.of(Category.OPTIMIZER)
        assert remembered == 2 * own - 2 * own // replicas
        # As gradients are handed over, beside a row of all of them lies the one that comes back.
        rows = other.of(Category.COMMUNICATION) - one.of(Category.COMMUNICATION)
        assert rows == own // replicas
        assert one.peak - other.peak == remembered - own // replicas - rows


@pytest.mark.parametrize("replicas", [2, 4])
def test_an_update_steps_its_own_rows(replicas):
    """As much is sent: gradients around the ring once, weights once; a part of it is stepped."""
    whole, divided = planned(replicas), planned(replicas, WeightSharding.OPTIMIZER)
    sent_s = 2 * (replicas - 1) / replicas * 2 * TRAINED / SLOW.bandwidth
    stepped_s = (3 + 2 * 2) * 2 * TRAINED / FLAT.memory_bandwidth

    for one, other in zip(whole.stages, divided.stages, strict=True):
        assert one.update_s == pytest.approx(sent_s + stepped_s)
        assert other.update_s == pytest.approx(sent_s + stepped_s / replicas)


def test_the_plan_says_it():
    divided = planned(2, WeightSharding.OPTIMIZER)

    assert divided.sharding is WeightSharding.OPTIMIZER
    assert Plan.from_json(divided.to_json()).sharding is WeightSharding.OPTIMIZER
    assert "optimizer and resting weights divided" in headline(divided).plain
    assert "divided" not in headline(planned(2)).plain


@pytest.mark.parametrize("sharding", [kind for kind in WeightSharding if kind.described])
def test_there_must_be_something_to_divide_and_somebody(sharding):
    with pytest.raises(UsageError, match="among replicas, of which there is one"):
        Policy(sharding=sharding)
    with pytest.raises(UsageError, match="for training, and with --mode infer there is none"):
        CompileOptions(stages=2, data_parallel=2, sharding=sharding, training=False)
