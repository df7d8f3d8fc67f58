"""Plans that fit, by what their memory comes to exactly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Policy, RematChoice
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.plan.memory_curve import DeviceMemory
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.memory_fit import choose_exactly
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import ScheduleKind

STAGES, MICROBATCHES = 2, 4
POLICY = Policy(schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.AUTO)


@pytest.fixture(scope="module")
def graph() -> Graph:
    layers = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh(), nn.Sigmoid())]
    target = torch.ones(64, 24)
    return trace(nn.Sequential(*layers), torch.ones(64, 24), target=target, loss_fn=F.mse_loss)


def builder(graph: Graph, memory: int, remat: RematChoice = RematChoice.AUTO) -> CandidateBuilder:
    cluster = Cluster.of(dataclasses.replace(DEFAULT_HOST, memory=memory), IN_PROCESS)
    planner = Planner(graph, cluster)
    policy = dataclasses.replace(POLICY, remat=remat)
    return planner.builder(planner.choose(STAGES, MICROBATCHES, policy), policy, WORK // 100)


def fullest(found: tuple[DeviceMemory, ...]) -> int:
    return max(device.peak for device in found)


def test_whatever_fits_is_found_to(graph: Graph) -> None:
    least, most = (
        fullest(choose_exactly(builder(graph, 0, choice)).memory)
        for choice in (RematChoice.AUTO, RematChoice.NONE)
    )
    assert least < most
    for memory in (least, (least + most) // 2, most):
        exact = choose_exactly(builder(graph, memory))
        assert fullest(exact.memory) <= memory
        assert exact.candidate.found.slots == tuple(range(STAGES)), "alike devices changed places"


def test_what_does_not_fit_is_told(graph: Graph) -> None:
    memory = sum(state.bytes for state in graph.state.values()) // STAGES
    exact = choose_exactly(builder(graph, memory))
    assert fullest(exact.memory) > memory
