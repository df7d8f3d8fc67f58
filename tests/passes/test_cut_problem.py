"""A graph run stage by stage, with nothing but what the tables let each stage have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from gpipe_compiler.cluster import DEFAULT_HOST, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.ir import Ref
from gpipe_compiler.ir.interpret import Interpreter, bind
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.planner.cut_problem import CutFacts, problem_of
from gpipe_compiler.planner.stage_table import tabulate
from gpipe_compiler.runtime.spec import ScheduleKind

BATCH = 2
LINK = Link(1e9, 1e-6)
KINDS = (
    "linear norm relu relu_ add add_ view half split count buffer ones batch fill".split()  # noqa: SIM905  # reads as one line
)


def tables_for(graph, stages, kind=ScheduleKind.GPIPE, link=LINK):
    facts = CutFacts.of(graph, roofline(graph, DEFAULT_HOST))
    problem = problem_of(facts)
    found = cut(problem, CutSetting.equal(kind, stages, 4, link))
    names = (node.name for node in problem.nodes)
    return facts, tabulate(facts, dict(zip(names, found.stage_of, strict=True)), stages)


class Stages:
    """Runs stages one after the other, as devices that share nothing but the model's state."""

    def __init__(self, facts, table, eager):
        self.facts, self.table, self.eager = facts, table, eager
        self.graph = facts.graph
        self.interpreter = Interpreter(self.graph, eager.states)
        self.sent = {(c.value, t): c for c in table.crossings for t in c.targets}
        self.outputs = {}
        self.returned = {}

    def forward(self, known):
        """`known`: the values that follow from shapes, which a stage reads off what it has."""
        held = dict(self.eager.inputs)
        self.leaves, self.made = [], []
        for stage, names in enumerate(self.table.ops):
            leaves, environment = {}, {}
            for value in self.table.inputs[stage]:
                crossing = self.sent.get((value, stage))
                assert crossing is not None or (stage == 0 and value in self.eager.inputs)
                tensor = held[value].detach().clone()
                if crossing is not None and crossing.gradient:
                    leaves[value] = tensor.requires_grad_()
                environment[value] = tensor.clone()
            for name in names:
                self.run(self.graph.op_of[name], environment, known)
            for value in self.table.outputs[stage]:
                held[value] = environment[value].detach()
            self.leaves.append(leaves)
            self.made.append(environment)
        return held

    def run(self, op, environment, known):
        if op.name in self.facts.duplicable and all(v in known for v in op.outputs):
            environment.update({name: known[name] for name in op.outputs})
        else:
            bind(op.result, self.interpreter.call(op.call, environment), environment)

    def backward(self):
        gradients = {}
        for stage in reversed(range(len(self.table.ops))):
            made = self.made[stage]
            roots = [
                (made[c.value], gradients[c.value])
                for c in self.table.crossings
                if c.source == stage and c.gradient and c.value in gradients
            ]
            if self.graph.loss.value in made:
                roots.append((made[self.graph.loss.value], torch.tensor(1.0)))
            roots = [(root, gradient) for root, gradient in roots if root.requires_grad]
            if roots:
                torch.autograd.backward(*zip(*roots, strict=True))
            for value, leaf in self.leaves[stage].items():
                if leaf.grad is not None:
                    gradients[value] = gradients.get(value, 0) + leaf.grad


def hold_against_eager(graph, facts, table, eager):
    plain = eager(graph, BATCH)
    expected = plain.run()
    trained = [n for n, s in plain.states.items() if s.requires_grad]
    if expected[graph.loss.value].requires_grad:
        try:
            expected[graph.loss.value].backward()
        except RuntimeError:  # it writes to what autograd keeps: torch itself does not train it
            reject()
    known = {name: expected[name] for name in facts.templates}
    staged = eager(graph, BATCH)
    stages = Stages(facts, table, staged)
    held = stages.forward(known)
    if expected[graph.loss.value].requires_grad:
        stages.backward()

    for value in set(graph.output_values) - plain.inputs.keys():
        assert torch.allclose(held[value], expected[value], atol=1e-6), value
    loss = next(m[graph.loss.value] for m in stages.made if graph.loss.value in m)
    assert torch.allclose(loss, expected[graph.loss.value], atol=1e-5)
    for name in plain.states:
        assert torch.allclose(staged.states[name], plain.states[name], atol=1e-6), name
    for name in trained:
        ours, theirs = staged.states[name].grad, plain.states[name].grad
        zero = torch.zeros_like(plain.states[name])
        ours, theirs = (zero if g is None else g for g in (ours, theirs))
        assert torch.allclose(ours, theirs, atol=1e-5), name


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([Link(1e12, 0.0), Link(1e6, 1e-4)]))
def test_random_graphs_run_stage_by_stage(random_graphs, eager, data, stages, link):
    """Outputs, loss, state and gradients are those of the whole, whatever the cut."""
    graph = annotate(data.draw(random_graphs(12, KINDS)), BATCH)
    try:
        facts, table = tables_for(graph, stages, link=link)
    except PlanError:
        assume(False)  # more stages than parts

    check_tables(facts, table)
    hold_against_eager(graph, facts, table, eager)


def check_tables(facts, table):
    """What must hold of any tables."""
    graph = facts.graph
    kept = [
        name
        for names, copies in zip(table.ops, table.duplicates, strict=True)
        for name in names
        if name not in copies
    ]
    assert sorted(kept) == sorted(op.name for op in facts.kept)
    assert all(
        set(names) - set(copies) for names, copies in zip(table.ops, table.duplicates, strict=True)
    )
    inputs = {source.name for source in graph.inputs}
    for crossing in table.crossings:
        assert all(crossing.source < target for target in crossing.targets)
        assert all(crossing.value in table.inputs[target] for target in crossing.targets)
        assert crossing.value in inputs or crossing.value in table.outputs[crossing.source]
        assert not crossing.gradient or crossing.dtype.is_floating_point
    for value in graph.output_values:
        assert value in inputs or sum(value in outputs for outputs in table.outputs) >= 1
    for name in graph.loss_only - facts.duplicable:
        assert name in table.ops[-1]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_network_with_a_shortcut_runs_stage_by_stage(convnet, eager, stages):
    graph = annotate(convnet, BATCH)

    facts, table = tables_for(graph, stages)

    check_tables(facts, table)
    hold_against_eager(graph, facts, table, eager)
    target = next(c for c in table.crossings if c.value == "target")
    assert (target.source, target.targets, target.gradient) == (0, (stages - 1,), False)
    assert table.ops[-1][-1] == "loss"
    assert table.outputs[-1] == ("scores",)


def test_what_is_only_looked_at_brings_no_gradient_back(builder):
    """A value that a later stage turns into integers crosses without a gradient."""
    b = builder(x=torch.randn(2, 4))
    b.add_module("first", torch.nn.Linear, 4, 4)
    b.add_module("second", torch.nn.Linear, 4, 4)
    h = b.module("first", Ref("x"), name="h")
    best = b.method("argmax", h, 1, name="best")
    cut_off = b.method("detach", h, name="cut_off")
    g = b.module("second", cut_off, name="g")
    graph = annotate(b.graph((best, g), b.method("sum", g, name="loss")), BATCH)
    facts = CutFacts.of(graph, roofline(graph, DEFAULT_HOST))
    stage_of = {"h": 0, "best": 1, "cut_off": 1, "g": 1, "loss": 1}

    table = tabulate(facts, stage_of, 2)

    (crossing,) = table.crossings
    assert (crossing.value, crossing.gradient) == ("h", False)
    assert facts.graph.values["h"].requires_grad


def test_a_problem_weighs_values_once_and_leaves_copies_out(builder):
    """Copied ops are no nodes; inputs lie on the first stage; integers send nothing back."""
    b = builder(x=torch.randn(2, 4), target=torch.tensor([1, 3]))
    b.add_module("first", torch.nn.Linear, 4, 4)
    h = b.module("first", Ref("x"), name="h")
    n = b.method("size", h, 0, name="n")
    table = b.call(torch.ones, n, 4, name="table")
    s = b.call(torch.add, h, table, name="s")
    loss = b.call(torch.nn.functional.cross_entropy, s, Ref("target"), name="loss")
    graph = annotate(b.graph(s, loss), BATCH)
    facts = CutFacts.of(graph, roofline(graph, DEFAULT_HOST))

    problem = problem_of(facts)

    assert [node.name for node in problem.nodes] == ["h", "s", "loss"]
    trained = [(kept.users, kept.updated_bytes) for kept in problem.kept if kept.updated_bytes]
    assert sorted(trained) == [((0,), 16), ((0,), 64)]
    rows = {v.name: (v.producer, v.consumers, v.bytes, v.gradient_bytes) for v in problem.values}
    assert rows == {
        "x": (GRAPH_INPUT, (0,), 32, 0),
        "target": (GRAPH_INPUT, (2,), 16, 0),
        "h": (0, (1,), 32, 32),
        "s": (1, (2,), 32, 32),
    }
    assert problem.last == {2}
    assert not problem.last_alone
