"""Parameters on several stages: what their gradients' sum costs, and when one stage is cheaper.

The times are worked out by hand: equal layers on a device whose only cost is arithmetic.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import PlanError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import StageTimes

WIDTH = 64
BYTES = WIDTH * WIDTH * 4
SAMPLES = 8
LAYERS = 6
FAST = Link(1e18, 0.0)
FLAT = Device("flat", 1e9, 1e18, 1 << 34, 0.0)


class Shared(nn.Module):
    """Six equal layers, of which some pairs have one weight."""

    def __init__(self, pairs):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for first, second in pairs:
            self.layers[second].weight = self.layers[first].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def traced(pairs: tuple[tuple[int, int], ...]) -> Graph:
    return trace(Shared(pairs), (torch.randn(SAMPLES, WIDTH),), loss=LossChoice.SUM_OF_SQUARES)


def planned(link: Link, stages: int = 2, pairs: tuple[tuple[int, int], ...] = ((2, 3),)) -> Plan:
    graph = traced(pairs)
    return plan(graph, stages=stages, microbatches=4, cluster=Cluster.of(FLAT, link))


def owners(found: Plan, name: str) -> list[int]:
    return [stage.index for stage in found.stages if name in stage.state]


def test_a_free_sum_leaves_the_stages_equal():
    """Three layers each; the sum takes no time worth the name."""
    found = planned(FAST)

    assert owners(found, "layers.2.weight") == [0, 1]
    assert found.prediction.shared_sum_s == pytest.approx(2 * BYTES / 1e18)


def test_a_dear_sum_brings_the_layers_together():
    """With a sum as long as the step, two layers and four are quicker than three and three."""
    compute_s = planned(FAST).prediction.step_s
    found = planned(Link(2 * BYTES / compute_s, 0.0))

    assert len(owners(found, "layers.2.weight")) == 1
    assert found.prediction.shared_sum_s == 0


def test_a_sum_that_is_cheaper_than_unequal_stages_is_taken():
    """It ends the step: the first stage is the last to have its gradients."""
    free = planned(FAST).prediction.step_s
    bandwidth = 2 * BYTES / (0.02 * free)
    found = planned(Link(bandwidth, 0.0))
    boundary_s = SAMPLES / 4 * WIDTH * 4 / bandwidth

    assert owners(found, "layers.2.weight") == [0, 1]
    assert found.prediction.shared_sum_s == pytest.approx(0.02 * free)
    assert found.prediction.step_s == pytest.approx(1.02 * free, abs=10 * boundary_s)
    assert not found.prediction.proved
    assert found.prediction.lower_bound_s <= found.prediction.step_s


def test_owners_on_one_device_add_up_among_themselves():
    """Its gradients cross once there and back for each further device, not for each stage."""
    for schedule, pairs, sums in (
        (ScheduleKind.ZBV, ((0, 5),), 0),
        (ScheduleKind.INTERLEAVED, ((0, 5),), 2),
        (ScheduleKind.INTERLEAVED, ((0, 3), (0, 5)), 2),
        (ScheduleKind.ONE_F_ONE_B, ((0, 3), (0, 5)), 4),
    ):
        found = plan(
            traced(pairs),
            stages=4,
            microbatches=4,
            cluster=Cluster.of(FLAT, FAST),
            policy=Policy(schedule=schedule, prove=True),
        )
        assert found.prediction.shared_sum_s == pytest.approx(sums * BYTES / 1e18, abs=0), schedule
        held = owners(found, "layers.0.weight")
        assert len({found.placement[stage] for stage in held}) == 1 + sums // 2
        assert found.prediction.proved is (sums == 0)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 1.0])
def test_no_cut_is_quicker(share, monkeypatch):
    """Two shared weights, three stages: compared with every cut between layers."""
    pairs = ((1, 2), (3, 4))
    free = planned(FAST, 3, pairs).prediction.step_s
    link = Link(2 * BYTES / (share * free), 0.0)
    found = planned(link, 3, pairs)
    steps = []
    for ends in itertools.combinations(range(1, LAYERS), 2):
        monkeypatch.setattr("gpipe_compiler.planner.candidates.cut", cut_at(ends))
        steps.append(planned(link, 3, pairs).prediction.step_s)

    assert found.prediction.step_s <= min(steps) * (1 + 1e-9)
    assert max(steps) > min(steps) * 1.01


def cut_at(ends):
    """In the place of `passes.cut.cut`: the layers up to each end make a stage."""

    def cut(problem, setting, **_):
        if any(len(group) > 1 and min(group) < LAYERS for group in problem.groups):
            raise PlanError("these cuts are given")
        layer_of = {node.name: layer for layer, node in enumerate(problem.nodes)}
        stage_of = [sum(end <= layer_of[node.name] for end in ends) for node in problem.nodes]
        stages, link = setting.stages, setting.links[0][1]
        boundary_s = link.seconds(SAMPLES // 4 * WIDTH * 4)
        times = []
        for stage in range(stages):
            mine = [n for n, s in zip(problem.nodes, stage_of, strict=True) if s == stage]
            times.append(
                StageTimes(
                    sum(node.forward_s for node in mine),
                    sum(node.backward_s for node in mine),
                    boundary_s if stage else 0.0,
                    boundary_s if stage else 0.0,
                )
            )
        return Cut(tuple(stage_of), tuple(times), 1.0, 0.0, False, 1, slots=tuple(range(stages)))

    return cut
