"""Ops that the compiler writes in place forbid no cut, and cost no plan anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import trace
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner


class Chain(nn.Module):
    """Nearly all its work is in ops that may be in place; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 256), nn.Linear(256, 256)
        self.c, self.d = nn.Linear(256, 256), nn.Linear(256, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x))
        h = self.act(torch.neg(self.b(h)) + h * 0.5)
        h = (self.c(h) * 2).tanh()
        return self.d(h)  # type: ignore[no-any-return]  # a module returns what it returns


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_ops_in_place_forbid_no_cut(stages: int) -> None:
    """The step is that without ops in place, and every stage writes what it has made itself."""
    torch.manual_seed(0)
    model, x, target = Chain(), torch.randn(64, 8), torch.randint(4, (64,))
    graph = trace(model, x, target=target, loss_fn=F.cross_entropy)
    planner = Planner(graph, Cluster.of(DEFAULT_HOST, Link(1e12, 0.0)))

    def planned(*, in_place: bool) -> Plan:
        policy = Policy(in_place=in_place, prove=True)
        return planner.plan(planner.choose(stages, 4, policy), policy)

    made, plain = planned(in_place=True), planned(in_place=False)

    assert made.prediction.step_s == pytest.approx(plain.prediction.step_s, rel=1e-9)
    assert made.prediction.proved
    assert plain.prediction.proved
    assert made.graph is not None
    written = effects(made.graph).writes
    assert written  # inside of stages it goes on
    for stage in made.stages:
        for op in stage.ops:
            assert written.get(op, frozenset()).isdisjoint(stage.inputs)
    assert_same_gradients(made, model, x[:16], target[:16])


def assert_same_gradients(plan: Plan, model: Chain, x: Tensor, target: Tensor) -> None:
    """Those of stages that receive leaves, as autograd has them, and those of the model."""
    assert plan.graph is not None
    assert plan.graph.loss is not None
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    F.cross_entropy(model(x), target).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    given = {source.name for source in plan.graph.inputs}
    sent = dict(zip((source.name for source in plan.graph.inputs), (x, target), strict=True))
    received, made = [], []
    for stage in plan.stages:
        own = {name: sent[name].detach().clone() for name in stage.inputs}
        for name in own.keys() - given:
            own[name].requires_grad_()
        ops = tuple(plan.graph.op_of[name] for name in stage.ops)
        values = Interpreter(plan.graph.replace(ops=ops), states).run(own)
        sent.update(values)
        received.append(own)
        made.append(values)
    gradients = {plan.graph.loss.value: torch.tensor(1.0)}
    for own, values in zip(reversed(received), reversed(made), strict=True):
        ends = {n: g for n, g in gradients.items() if n in values and n not in own}
        torch.autograd.backward([values[n] for n in ends], list(ends.values()))
        for name, value in own.items():
            if value.grad is not None:
                gradients[name] = value.grad + gradients.get(name, 0)
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
