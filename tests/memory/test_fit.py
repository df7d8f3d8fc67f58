"""The first plan that fits: there is one wherever the search for the shortest step has one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import trace
from gpipe_compiler.drafting import Drafting
from gpipe_compiler.ir import Graph
from gpipe_compiler.memory.fit import choose_exactly, first_that_fits
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.planning import setting_for
from gpipe_compiler.policy import Policy, RematChoice
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.workbench import Workbench

STAGES, MICROBATCHES = 2, 4
POLICY = Policy(ScheduleKind.ONE_F_ONE_B, RematChoice.AUTO)


@pytest.fixture(scope="module")
def graph() -> Graph:
    layers = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh(), nn.Sigmoid())]
    target = torch.ones(64, 24)
    return trace(nn.Sequential(*layers), torch.ones(64, 24), target=target, loss_fn=F.mse_loss)


def drafting(graph: Graph, memory: int) -> Drafting:
    cluster = Cluster.of(dataclasses.replace(DEFAULT_HOST, memory=memory), IN_PROCESS)
    ready = Workbench(graph, cluster).prepare(MICROBATCHES, POLICY)
    setting = setting_for(cluster, STAGES, MICROBATCHES, POLICY, training=True)
    return Drafting.of(
        ready.graph,
        ready.costs,
        cluster.sized(STAGES),
        setting,
        POLICY,
        WORK // 100,
        facts=ready.facts,
    )


def test_whatever_fits_is_found_to(graph: Graph) -> None:
    def fullest(memory: int, choice: RematChoice) -> int:
        found = choose_exactly(drafting(graph, memory), choice, 1)[1]
        return max(device.peak for device in found)

    least, most = fullest(0, RematChoice.AUTO), fullest(0, RematChoice.NONE)
    assert least < most
    for memory in (least - 1, least, (least + most) // 2, most):
        draft, found = first_that_fits(drafting(graph, memory), 1)
        fits = max(device.peak for device in found) <= memory
        assert fits == (memory >= least)
        if memory == least:
            assert any(stage.recompute_s for stage in draft.stages)
        if memory == most:
            assert not any(stage.recompute_s for stage in draft.stages)
