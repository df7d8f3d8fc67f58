"""Writes and shared memory, compared with version counters and contents of real tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import ByMode, NoGrad, Op, Ref, Region, StateRef
from gpipe_compiler.ir.ops import MethodCall
from gpipe_compiler.passes.effects import effects


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_writes_are_those_that_bump_a_version_or_change_a_content(data, random_graphs, eager):
    graph = data.draw(random_graphs())
    found = effects(graph)
    run = eager(graph, graph.batch_size)
    seen = dict(run.inputs)
    checked = []

    def observer(op, execute):
        versions = {n: v._version for n, v in seen.items() if isinstance(v, torch.Tensor)}
        contents = {n: v.detach().clone() for n, v in run.states.items()}
        returned = execute()
        bumped = {n for n, version in versions.items() if seen[n]._version != version}
        changed = {n for n, old in contents.items() if not torch.equal(old, run.states[n])}
        assert found.writes.get(op.name, frozenset()) == bumped, op.name
        assert changed <= found.state_writes.get(op.name, frozenset()), op.name
        names = op.outputs
        seen.update(zip(names, (returned,) if len(names) == 1 else returned, strict=True))
        checked.append(op.name)
        return returned

    environment = run.run(observer)

    assert checked == [op.name for op in graph.ops]
    pointers = {
        name: value.untyped_storage().data_ptr()
        for name, value in environment.items()
        if isinstance(value, torch.Tensor)
    }
    for name, pointer in pointers.items():
        same = {other for other, theirs in pointers.items() if theirs == pointer}
        assert found.alias_set(name) == same


def test_batch_norm_writes_its_statistics_only_in_train_mode(builder):
    b = builder(x=torch.randn(3, 4))
    b.add_module("bn", nn.BatchNorm1d, 4)
    mean, var = b.add_state("mean", torch.zeros(4)), b.add_state("var", torch.ones(4))
    h = b.module("bn", Ref("x"), name="module")
    h = b.call(F.batch_norm, h, mean, var, training=True, name="train")
    h = b.call(F.batch_norm, h, mean, var, training=False, name="frozen")
    h = b.call(F.instance_norm, b.method("unsqueeze", h, 1), StateRef("one"), StateRef("two"))
    b.add_state("one", torch.zeros(1)), b.add_state("two", torch.ones(1))
    instance = b.ops[-1].name
    training = effects(b.graph(h, b.method("sum", h)))

    assert training.state_writes == {
        "module": {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"},
        "train": {"mean", "var"},
        instance: {"one", "two"},
    }
    assert training.writes == {}
    assert "bn.weight" not in training.written_states
    inference = effects(b.graph(h))
    assert "module" not in inference.state_writes


def test_a_write_through_a_view_reaches_the_buffer(builder):
    b = builder(x=torch.randn(3, 4))
    cache = b.add_state("cache", torch.zeros(8, 4))
    head = b.method("narrow", cache, 0, 0, 4, name="head")
    b.method("copy_", head, b.method("mean", Ref("x"), 0), name="write")
    read = b.method("sum", cache, name="read")
    graph = b.graph(read)
    found = effects(graph)

    assert found.state_writes == {"write": {"cache"}}
    assert found.writes == {"write": {"head"}}
    assert found.state_aliases["head"] == {"cache"}
    assert found.states_of(graph, graph.op_of["write"]) == {"cache"}


def test_what_is_written_without_gradients_is_written(builder):
    b = builder(x=torch.randn(3, 4))
    weight = b.add_state("weight", torch.zeros(3, 4, requires_grad=True))
    h = b.call(torch.relu, Ref("x"), name="h0")
    regions = (Region(NoGrad()),)
    b.ops.append(Op("inner", MethodCall("add_", (weight, 1)), None, regions=regions))
    b.ops.append(Op("double", MethodCall("mul_", (h, 2)), "doubled", regions=regions))
    found = effects(b.graph(Ref("doubled")))

    assert found.state_writes == {"inner": {"weight"}}
    assert found.writes == {"double": {"h0"}}
    assert found.alias_set("h0") == {"h0", "doubled"}


def test_setting_items_and_out_arguments_are_writes(builder):
    b = builder(x=torch.randn(3, 4))
    target = b.call(torch.zeros, 3, 4, name="target")
    b.method("__setitem__", target, (slice(None), 0), 1.0, name="setting")
    b.call(torch.exp, Ref("x"), out=target, name="exponential")
    found = effects(b.graph(target))

    assert found.writes["setting"] == {"target"}
    assert "target" in found.writes["exponential"]


def test_what_dropout_fills_for_itself_is_no_effect(builder):
    b = builder(x=torch.randn(3, 4))
    out = b.call(F.dropout, Ref("x"), 0.5)
    found = effects(b.graph(out, b.method("sum", out)))

    assert (found.writes, found.state_writes, found.aliases) == ({}, {}, {})


@pytest.mark.parametrize("written", [True, False])
def test_dropout_gives_its_argument_back_in_eval_mode(builder, written):
    """Which matters where somebody writes to it."""
    b = builder(x=torch.randn(3, 4))
    b.add_module("drop", nn.Dropout, 0.5)
    made = b.call(torch.sin, Ref("x"))
    first = b.module("drop", made)
    second = b.call(F.dropout, first, 0.5, training=ByMode(True, False))
    seen = b.call(torch.cos, second)
    if written:
        b.method("add_", made, 1)
    found = effects(b.graph(seen, b.method("sum", seen)))

    sharing = {first.name, second.name} if written else set()
    assert found.alias_set(made.name) & {first.name, second.name, seen.name} == sharing
