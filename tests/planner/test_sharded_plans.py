"""Replicas that divide weights and optimizer: what a plan says of memory and time, by hand."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Auto, CompileOptions, LossChoice, Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import Category
from gpipe_compiler.report.facts import headline
from gpipe_compiler.report.text import prediction_rows
from gpipe_compiler.runtime.core.shards import blocks_of
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind, WeightSharding
from gpipe_compiler.targets.planning import plan_as_asked, planner_of

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


def planned(
    replicas: int, sharding: WeightSharding = WeightSharding.NONE, link: Link = SLOW
) -> Plan:
    policy = Policy(data_parallel=replicas, sharding=sharding, optimizer=OptimizerKind.ADAMW)
    cluster = Cluster.of(FLAT, link)
    return plan(traced(), stages=2, microbatches=2, cluster=cluster, policy=policy)


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


@pytest.mark.parametrize("replicas", [2, 4])
def test_blocks_are_gathered_for_every_micro_batch(replicas):
    """Once in a forward, once in a backward, whose gradients go around once; and nothing later."""
    link = Link(1e6, 1e-3)
    whole, full = planned(replicas, link=link), planned(replicas, WeightSharding.FULL, link)
    gathered_s = (replicas - 1) / replicas * 2 * TRAINED / link.bandwidth + 2 * link.latency_s
    stepped_s = (3 + 2 * 2) * 2 * TRAINED / FLAT.memory_bandwidth

    for one, other in zip(whole.stages, full.stages, strict=True):
        assert other.forward_s == pytest.approx(one.forward_s + gathered_s)
        assert other.backward_s == pytest.approx(one.backward_s + 2 * gathered_s)
        assert other.update_s == pytest.approx(stepped_s / replicas + link.latency_s)


def test_one_block_is_whole_at_a_time():
    """Of two layers a half of each, and one whole; with its gradients going, the ones before it."""
    full = planned(2, WeightSharding.FULL)

    for memory in full.prediction.memory:
        assert memory.of(Category.WEIGHTS) == 2 * TRAINED // 2 + TRAINED
        assert memory.of(Category.COMMUNICATION) == 3 * TRAINED + 2 * TRAINED // 2
        assert memory.of(Category.OPTIMIZER) == 2 * 2 * TRAINED // 2
        assert memory.of(Category.GRADIENTS) <= 2 * TRAINED // 2


@pytest.mark.parametrize(
    ("memory", "found"), [(1 << 30, WeightSharding.OPTIMIZER), (0, WeightSharding.FULL)]
)
def test_the_quicker_one_that_fits_is_taken(memory, found):
    """Full sharding sends more, and is taken where nothing else fits."""
    wide = [nn.Linear(512, 512, bias=False) for _ in range(16)]
    graph = trace(nn.Sequential(*wide), (torch.randn(8, 512),), loss=LossChoice.SUM_OF_SQUARES)
    sizes = {}
    for sharding in (WeightSharding.OPTIMIZER, WeightSharding.FULL):
        options = asked(sharding, 1 << 30)
        made, _ = plan_as_asked(planner_of(graph, options), options, lambda _: None)
        sizes[sharding] = max(made.prediction.device_bytes)
    assert sizes[WeightSharding.FULL] < sizes[WeightSharding.OPTIMIZER]

    options = asked(Auto.AUTO, memory or sizes[WeightSharding.FULL])
    made, _ = plan_as_asked(planner_of(graph, options), options, lambda _: None)

    assert made.sharding is found
    assert made.fits


def asked(sharding: WeightSharding | Auto, memory: int) -> CompileOptions:
    return CompileOptions(
        stages=2,
        microbatches=2,
        data_parallel=2,
        sharding=sharding,
        optimizer=OptimizerKind.ADAMW,
        cluster=Cluster.of(dataclasses.replace(FLAT, memory=memory), SLOW),
    )


@pytest.mark.parametrize("kind", [ScheduleKind.ZB_H1, ScheduleKind.ZBV])
def test_full_needs_backwards_in_one_piece(kind):
    with pytest.raises(UsageError, match=r"which the schedule z.* puts off"):
        Policy(data_parallel=2, sharding=WeightSharding.FULL, schedule=kind)


def test_blocks_are_the_innermost_that_hold_several_modules():
    names = ["wte.weight", "h.0.ln.weight", "h.0.mlp.up.weight", "h.1.ln.weight", "h.1.mlp.up.bias"]
    experts = [f"e.0.experts.{n}.w{k}.weight" for n in range(2) for k in range(2)]
    names += [*experts, "e.0.gate.weight", "head.0.weight", "scale"]

    assert list(blocks_of(names).values()) == [
        *("wte", "h.0", "h.0", "h.1", "h.1"),
        *("e.0.experts.0", "e.0.experts.0", "e.0.experts.1", "e.0.experts.1"),
        *("e.0", "head.0", "scale"),
    ]


def test_the_plan_says_it():
    divided = planned(2, WeightSharding.OPTIMIZER)

    assert divided.sharding is WeightSharding.OPTIMIZER
    assert Plan.from_json(divided.to_json()).sharding is WeightSharding.OPTIMIZER
    assert "optimizer and resting weights divided" in headline(divided).plain
    sent = dict(prediction_rows(divided))["sharded"]  # weights and gradients of two layers, halved
    assert sent.endswith("among 2 replicas; 32 KiB a step from each device, at most")
    full = dict(prediction_rows(planned(2, WeightSharding.FULL)))["sharded"]
    assert "; 96 KiB a step" in full  # three times that of gradients, for two micro-batches
    assert "divided" not in headline(planned(2)).plain


@pytest.mark.parametrize("sharding", [kind for kind in WeightSharding if kind.described])
def test_there_must_be_something_to_divide_and_somebody(sharding):
    with pytest.raises(UsageError, match="among replicas, of which there is one"):
        Policy(sharding=sharding)
    with pytest.raises(UsageError, match="for training, and with --mode infer there is none"):
        CompileOptions(stages=2, data_parallel=2, sharding=sharding, training=False)
