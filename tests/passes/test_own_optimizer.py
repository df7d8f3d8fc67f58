"""What a user's optimizer remembers, compared with what it holds after a real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import OwnOptimizer, Policy
from gpipe_compiler.passes.footprint import own_optimizer
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import OptimizerKind


def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With a momentum for matrices alone."""
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim < 2]
    return torch.optim.SGD([{"params": matrices, "momentum": 0.9}, {"params": rest}], lr=0.1)


RATE = torch.tensor(0.1)

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "groups": groups,
    "fused, which is refused on meta": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "a rate in a tensor": lambda p: torch.optim.Adam(p, lr=RATE),
    "one that asks for numbers": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4))
    return trace(
        layers,
        torch.randn(8, 16),
        target=torch.randn(8, 4),
        loss_fn=nn.MSELoss(),
    )


@pytest.mark.parametrize("name", MAKERS)
def test_what_an_optimizer_remembers_is_what_it_holds_after_a_step(graph: Graph, name: str) -> None:
    found = own_optimizer(graph, MAKERS[name])

    assert isinstance(found, OwnOptimizer)
    real = {s.name: nn.Parameter(torch.ones(s.shape)) for s in graph.state.values()}
    for parameter in real.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = MAKERS[name](list(real.values()))
    optimizer.step()
    assert found.remembered == {
        path: sum(t.nbytes for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))
        for path, p in real.items()
    }


def test_the_plan_counts_it(graph: Graph) -> None:
    """As the same optimizer counts that is named; what it holds for every stage is told."""
    cluster = Cluster.of(DEFAULT_HOST, Link(1e9, 1e-6))

    def made(**options: Any) -> Plan:
        return plan(graph, stages=2, microbatches=2, cluster=cluster, **options)

    def held(optimizer: OptimizerKind) -> list[int]:
        return [s.state_bytes for s in made(policy=Policy(optimizer=optimizer)).stages]

    planned = made(make_optimizer=MAKERS["adamw"])
    assert planned.optimizer.startswith("AdamW of make_optimizer()")
    own = [stage.state_bytes for stage in planned.stages]
    named, plain = held(OptimizerKind.ADAMW), held(OptimizerKind.SGD)
    for mine, theirs, least in zip(own, named, plain, strict=True):
        assert theirs <= mine <= theirs + 100  # counts of steps
        assert theirs == 2 * least


def test_what_cannot_be_built_is_said(graph: Graph) -> None:
    def broken(parameters: object) -> object:
        raise RuntimeError("no such thing")

    assert own_optimizer(graph, broken) == "RuntimeError: no such thing"
    assert "no torch.optim.Optimizer" in str(own_optimizer(graph, lambda p: p))
    with pytest.raises(UsageError, match="no such thing") as caught:
        plan(graph, stages=2, make_optimizer=broken)
    assert "Policy(optimizer=" in caught.value.hint
