"""How many micro-batches there are by default: no more than pay, and as many as it takes to fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.options import Auto, Policy, RematChoice
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import explore
from gpipe_compiler.planner.search_space import SearchSpace
from gpipe_compiler.runtime.spec import ScheduleKind

POLICY = Policy(schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.NONE)
LINK = Link(1e9, 1e-5)
ROOM = 10**9


@pytest.fixture(scope="module")
def graph() -> gpc.Graph:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh()))
    x = torch.randn(256, 16)
    return gpc.trace(nn.Sequential(*layers), x, target=x, loss_fn=nn.MSELoss())


def planner(graph: gpc.Graph, memory: int = ROOM) -> Planner:
    device = dataclasses.replace(DEFAULT_HOST, memory=memory)
    return Planner(graph, Cluster.of(device, LINK))


@pytest.mark.parametrize("stages", [2, 4])
def test_small_kernels_make_as_few_as_there_are_stages(graph: gpc.Graph, stages: int) -> None:
    assert planner(graph).default_microbatches(stages, POLICY) == stages


def test_kernels_that_cost_nothing_to_launch_make_the_most(graph: gpc.Graph) -> None:
    free = Planner(
        graph, Cluster.of(dataclasses.replace(DEFAULT_HOST, flops=1e6, launch_s=0.0), LINK)
    )
    assert free.default_microbatches(2, POLICY) == 8


def test_where_it_does_not_fit_there_are_more(graph: gpc.Graph) -> None:
    choice, made = planner(graph).planned(2, None, POLICY)
    tight = planner(graph, int(0.8 * max(made.prediction.device_bytes)))

    smaller, other = tight.planned(2, None, POLICY)

    assert choice.microbatches < smaller.microbatches == other.microbatches
    assert other.fits
    assert not tight.planned(2, choice.microbatches, POLICY)[1].fits  # as given


def test_a_search_finds_what_fits_with_more(graph: gpc.Graph) -> None:
    _, made = planner(graph).planned(2, None, POLICY)
    tight = planner(graph, int(0.8 * max(made.prediction.device_bytes)))
    options = CompileOptions(2, None, schedule=Auto.AUTO, remat=RematChoice.NONE)
    wish = SearchSpace.of(dataclasses.replace(options, cluster=tight.cluster))

    assert explore(tight, wish, POLICY).fits
