"""Atoms, compared with what happens when a graph is cut wherever they allow it."""

from __future__ import annotations

import operator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_compiler.ir import ByMode, Mode, Ref, ValueKind
from gpipe_compiler.ir.values import StateKind
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.duplicate import (
    BatchMultiple,
    StageDevice,
    closure,
    duplicable,
    shape_values,
)
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.shapes import annotate


def filled(template, batch):
    match template:
        case BatchMultiple(factor=factor):
            return factor * batch
        case StageDevice():
            return torch.device("cpu")
        case tuple():
            return tuple(filled(item, batch) for item in template)
        case _:
            return template


def random_down_set(graph, found, data):
    """Names of the ops of a first stage: any set of groups closed under what comes before."""
    before = {name: set() for name in found.leader}
    pairs = list(found.precedence)
    for op in graph.ops:
        makers = (graph.producer.get(name) for name in op.inputs)
        pairs += [(m.name, op.name) for m in makers if m is not None]
    for first, second in pairs:
        if first in found.leader and second in found.leader:
            before[found.leader[second]].add(found.leader[first])
    leaders = sorted(set(found.leader.values()))
    pending = set(data.draw(st.lists(st.sampled_from(leaders), unique=True))) if leaders else set()
    chosen = set()
    while pending:
        leader = pending.pop()
        if leader not in chosen:
            chosen.add(leader)
            pending |= before[leader]
    chosen -= {found.leader[name] for name in found.last_stage}
    return {name for name, leader in found.leader.items() if leader in chosen}


def run_cut(run, stages, facts, batch):
    """Runs each stage on copies of what it receives; state that nobody writes is copied too."""
    graph, found_effects, copied, templates = facts
    outputs, loss = graph.output_values, graph.loss.value
    produced = {name: value.clone() for name, value in run.inputs.items()}
    written = found_effects.written_states
    for stage in stages:
        for name in run.states.keys() - written:
            run.states[name] = run.states[name].detach().clone()
        own = closure(graph, found_effects, copied, stage)
        environment = {}
        for op in graph.ops:
            if op.name in stage or op.name in own:
                missing = [name for name in op.inputs if name not in environment]
                if op.name in own and any(
                    name not in produced or graph.producer.get(name) is not None for name in missing
                ):
                    returned = tuple(filled(templates[name], batch) for name in op.outputs)
                    environment.update(zip(op.outputs, returned, strict=True))
                    continue
                for name in missing:
                    assert graph.values[name].kind is ValueKind.TENSOR, f"{name} crosses"
                    environment[name] = produced[name].clone()
                returned = run.interpreter.call(op.call, environment)
                results = (returned,) if isinstance(op.result, str) else returned
                environment.update(zip(op.outputs, results, strict=True))
        fresh = {name for op in graph.ops if op.name in stage for name in op.outputs}
        for name, value in environment.items():
            if name in fresh or (name in outputs and name not in produced):
                produced[name] = value
    return {name: produced[name] for name in (*outputs, loss)}


# Random ops draw in another order when stages run apart; the runtime numbers them, this test not.
KINDS = (
    "linear", "norm", "relu", "relu_", "add", "add_", "view", "half", "split", "count", "buffer",
    "ones", "batch", "fill",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_cut_between_atoms_changes_no_number(data, random_graphs, eager):
    graph = annotate(data.draw(random_graphs(14, KINDS)), 3)
    found_effects = effects(graph)
    copied = duplicable(graph, found_effects)
    facts = (graph, found_effects, copied, shape_values(graph))
    found = atoms(graph, found_effects, copied)
    first = random_down_set(graph, found, data)
    second = found.leader.keys() - first
    whole, apart = eager(graph, 3), eager(graph, 3)
    with torch.no_grad():
        expected = whole.run()
        actual = run_cut(apart, (first, second), facts, 3)

    for name, tensor in actual.items():
        if name not in whole.inputs:  # an input that is returned comes straight from the caller
            torch.testing.assert_close(tensor, expected[name], msg=name)
    for name in whole.states:
        assert graph.state[name].kind in StateKind
        torch.testing.assert_close(apart.states[name], whole.states[name], msg=name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_contracted_groups_form_no_cycle_and_the_graph_order_is_legal(data, random_graphs):
    graph = annotate(data.draw(random_graphs(14)), 3)
    found_effects = effects(graph)
    copied = duplicable(graph, found_effects)
    found = atoms(graph, found_effects, copied)
    position = {op.name: index for index, op in enumerate(graph.ops)}

    assert found.leader.keys() == {op.name for op in graph.ops} - copied
    assert all(position[a] < position[b] for a, b in found.precedence)
    assert all(position[leader] <= position[name] for name, leader in found.leader.items())
    edges = {(found.leader[a], found.leader[b]) for a, b in found.precedence}
    for op in graph.ops:
        for name in op.inputs:
            maker = graph.producer.get(name)
            if maker is not None and maker.name in found.leader and op.name in found.leader:
                edges.add((found.leader[maker.name], found.leader[op.name]))
    edges = {(a, b) for a, b in edges if a != b}
    nodes = set(found.leader.values())
    while nodes:
        free = nodes - {b for a, b in edges if a in nodes}
        assert free, f"a cycle among {nodes}"
        nodes -= free


def test_an_in_place_op_stays_with_its_maker_and_earlier_readers(convnet):
    graph = annotate(convnet, 2)
    found = atoms(graph, effects(graph))

    assert found.leader["a_relu"] == found.leader["a_bn"]
    assert found.leader["b_relu"] == found.leader["b_add"] == found.leader["b_conv"]
    assert found.leader["a_conv"] == "a_conv"
    assert found.leader["pool"] == "pool"
    assert ("b_relu", "pool") in found.precedence
    assert found.last_stage == {"loss"}


def test_a_later_reader_of_a_written_value_is_free(builder):
    b = builder(x=torch.randn(3, 4))
    h = b.call(torch.exp, Ref("x"), name="make")
    b.call(torch.relu_, h, name="write")
    b.call(torch.tanh, h, name="late")
    graph = annotate(b.graph(Ref("late")), 3)
    found = atoms(graph, effects(graph))

    assert found.groups == (frozenset({"make", "write"}),)
    assert found.leader["late"] == "late"
    assert ("write", "late") in found.precedence


def test_a_written_input_is_copied_first_and_returned_as_written(builder):
    """Only the writer is bound to the copy; later stages and the caller get what was written."""
    b = builder(x=torch.randn(3, 4))
    b.call(torch.relu_, Ref("x"), name="write")
    b.call(torch.tanh, Ref("x"), name="late")
    graph = annotate(b.graph((Ref("late"), Ref("x"))), 3)

    assert atoms(graph, effects(graph)).groups == (frozenset({"x_1", "write"}),)
    assert graph.outputs == (Ref("late"), Ref("x_1"))
    assert annotate(graph, 3).ops == graph.ops


def test_all_users_of_a_written_buffer_stay_together(builder):
    b = builder(x=torch.randn(3, 4))
    count = b.add_state("count", torch.zeros(()))
    h = b.call(operator.mul, Ref("x"), count, name="before")
    h = b.call(torch.exp, h, name="between")
    b.method("add_", count, 1, name="write")
    h = b.call(operator.add, h, count, name="after")
    graph = annotate(b.graph(h), 3)
    found = atoms(graph, effects(graph))

    assert found.groups == (frozenset({"before", "between", "write", "after"}),)
    assert {("before", "write"), ("write", "after")} <= set(found.precedence)


def test_a_shared_batch_norm_is_one_atom(builder):
    b = builder(x=torch.randn(3, 4))
    b.add_module("bn", nn.BatchNorm1d, 4)
    h = b.module("bn", Ref("x"), name="first")
    h = b.call(torch.tanh, h, name="middle")
    h = b.module("bn", h, name="second")
    graph = annotate(b.graph(h, b.method("sum", h)), 3)

    assert frozenset({"first", "middle", "second"}) in atoms(graph, effects(graph)).groups


def test_values_that_cannot_cross_hold_their_readers(builder):
    b = builder(x=torch.randn(3, 4))
    square = b.call(torch.matmul, Ref("x"), b.method("t", Ref("x"), name="t"), name="square")
    rows = b.method("sum", square, 1, name="rows")
    n = b.method("size", rows, 0, name="n")
    odd = b.call(operator.add, n, 1, name="odd")
    b.call(operator.mul, rows, odd, name="out")
    graph = annotate(b.graph(Ref("out")), 3)
    found_effects = effects(graph)
    without = atoms(graph, found_effects)
    copied = duplicable(graph, found_effects)

    assert set(without.groups) == {frozenset({"square", "rows"}), frozenset({"n", "odd", "out"})}
    assert copied == {"n", "odd"}
    assert atoms(graph, found_effects, copied).groups == (frozenset({"square", "rows"}),)


def test_ops_of_one_mode_stay_with_the_readers_of_their_values(builder):
    b = builder(x=torch.randn(3, 4))
    h = b.call(torch.exp, Ref("x"), name="h")
    mask = b.call(torch.bernoulli, h, 0.5, mode=Mode.TRAIN, name="mask")
    masked = b.call(operator.mul, h, mask, mode=Mode.TRAIN, name="masked")
    out = b.call(torch.relu, ByMode(masked, h), name="out")
    graph = annotate(b.graph(out, b.method("sum", out, name="total")), 3)
    found = atoms(graph, effects(graph))

    assert found.groups == (frozenset({"mask", "masked", "out"}),)
    assert found.last_stage == {"total"}


def test_what_serves_only_the_loss_is_one_atom_in_the_last_stage(builder):
    b = builder(x=torch.randn(3, 4), target=torch.randn(3, 4))
    h = b.call(torch.exp, Ref("x"), name="h")
    rest = b.call(operator.sub, h, Ref("target"), name="rest")
    other = b.call(torch.exp, Ref("target"), name="other")
    loss = b.call(torch.dot, b.method("flatten", rest), b.method("flatten", other), name="loss")
    graph = annotate(b.graph(h, loss), 3)
    found = atoms(graph, effects(graph))

    assert found.last_stage == {op.name for op in graph.ops} - {"h"}
    assert found.groups == (found.last_stage,)


def test_a_view_of_a_buffer_that_is_written_by_its_own_name(builder):
    b = builder(x=torch.randn(3, 4))
    cache = b.add_state("cache", torch.zeros(8, 4))
    head = b.method("narrow", cache, 0, 0, 1, name="head")
    read = b.call(operator.add, Ref("x"), head, name="early")
    b.method("fill_", cache, 1.0, name="write")
    out = b.call(operator.add, read, head, name="late")
    graph = annotate(b.graph(out), 3)
    found = atoms(graph, effects(graph))

    assert found.groups == (frozenset({"head", "early", "write", "late"}),)
    assert {("early", "write"), ("write", "late")} <= set(found.precedence)


def test_loss_ops_whose_input_is_overwritten_run_in_their_place(builder):
    """An auxiliary loss taken before an in-place activation cannot wait for the end."""
    b = builder(x=torch.randn(3, 4))
    h = b.call(torch.exp, Ref("x"), name="h")
    scaled = b.call(operator.mul, Ref("x"), 2, name="scaled")
    first = b.method("mean", h, name="aux")
    h = b.call(torch.relu_, h, name="relu")
    out = b.call(operator.mul, h, 3, name="out")
    second = b.method("mean", scaled, name="free")
    loss = b.call(operator.add, first, second, name="loss")
    count = b.add_state("running", torch.zeros(()))
    b.method("copy_", count, loss, name="record")
    graph = annotate(b.graph(out, loss), 3)

    assert graph.held == {"aux"}
    assert graph.loss_only == {"scaled", "free", "loss", "record"}
    assert atoms(graph, effects(graph)).last_stage == graph.loss_only
