"""What every stage computes for itself."""

from __future__ import annotations

import operator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import ByMode, Mode, Ref
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


def found_in(graph, batch_size=3):
    graph = annotate(graph, batch_size)
    return duplicable(graph, effects(graph))


def test_a_causal_mask_and_positions_are_copied_and_the_learned_table_is_not(builder):
    b = builder(tokens=torch.zeros(2, 5, dtype=torch.int64))
    b.add_module("words", nn.Embedding, 10, 8)
    b.add_module("places", nn.Embedding, 5, 8)
    full = b.add_state("full_mask", torch.ones(9, 9).tril().bool())
    h = b.module("words", Ref("tokens"))
    n = b.method("size", Ref("tokens"), 0, name="n")
    length = b.method("size", h, 1, name="length")
    device = b.call(getattr, Ref("tokens"), "device", name="device")
    places = b.call(torch.arange, length, device=device, name="places_")
    h = b.call(operator.add, h, b.module("places", places, name="learned"))
    mask = b.call(operator.getitem, full, (slice(None, length), slice(None, length)), name="mask")
    noise = b.call(torch.rand, n, 5, name="noise")
    scores = b.call(torch.matmul, h, b.method("transpose", h, 1, 2))
    scores = b.method("masked_fill", scores, mask, 0.0)
    scores = b.method("view", scores, n, -1)
    out = b.call(operator.mul, scores, b.method("repeat", noise, 1, 5))
    graph = annotate(b.graph(out, b.method("sum", out)), 2)
    found_effects = effects(graph)
    found = duplicable(graph, found_effects)

    assert found == {"n", "length", "device", "places_", "mask"}
    assert shape_values(graph) == {"n": BatchMultiple(1), "length": 5, "device": StageDevice()}
    assert closure(graph, found_effects, found, ["learned"]) == {"places_", "length", "device"}
    assert closure(graph, found_effects, found, ["mask"]) == {"mask", "length"}


def test_sizes_have_templates(builder):
    b = builder(x=torch.randn(3, 4))
    wide = b.method("repeat", Ref("x"), 2, 1)
    b.call(getattr, wide, "shape", name="shape")
    b.method("size", Ref("x"), name="both", results=2)
    b.call(getattr, wide, "dtype", name="dtype")
    n = b.call(len, wide, name="n")
    b.call(operator.add, n, 1, name="more")
    b.call(operator.mul, n, 3, name="times")
    b.call(operator.floordiv, n, n, name="one")
    graph = annotate(b.graph(wide), 4)

    assert shape_values(graph) == {
        "shape": (BatchMultiple(2), 4),
        "both_0": BatchMultiple(1),
        "both_1": 4,
        "dtype": torch.float32,
        "n": BatchMultiple(2),
        "times": BatchMultiple(6),
        "one": 1,
    }
    assert duplicable(graph, effects(graph)) >= {"more", "times", "one"}


def test_a_table_that_somebody_else_writes_is_not_copied(builder):
    b = builder(x=torch.randn(3, 4))
    own = b.call(torch.zeros, 4, name="own")
    b.method("fill_", own, 3.0, name="fill_own")
    tainted = b.call(torch.zeros, 4, name="tainted")
    view = b.method("view", tainted, 2, 2, name="view")
    b.call(torch.exp, view, name="follows")
    b.method("add_", tainted, b.method("mean", Ref("x"), 0), name="taint")
    count = b.add_state("count", torch.zeros(4))
    b.call(torch.exp, count, name="of_written_buffer")
    b.method("add_", count, 1, name="write")
    fixed = b.add_state("fixed", torch.zeros(4))
    b.call(torch.exp, fixed, name="of_buffer")
    trained = b.add_state("trained", torch.zeros(4), trainable=True)
    detached = b.method("detach", trained, name="of_parameter")
    guarded = b.call(torch.zeros, 4, name="guarded", mode=Mode.TRAIN)
    dropped = b.call(F.dropout, own, 0.5, name="dropped")
    graph = b.graph((detached, dropped), b.method("sum", dropped))

    assert guarded.name == "guarded"
    assert found_in(graph) == {"own", "fill_own", "of_buffer"}


def test_the_closure_brings_the_writes_that_a_reader_sees(builder):
    b = builder(x=torch.randn(3, 4))
    table = b.call(torch.zeros, 4, name="table")
    head = b.method("narrow", table, 0, 0, 2, name="head")
    b.method("fill_", head, 1.0, name="fill")
    out = b.call(operator.add, Ref("x"), table, name="reader")
    b.method("fill_", table, 9.0, name="later")
    graph = annotate(b.graph(out), 3)
    found_effects = effects(graph)
    found = duplicable(graph, found_effects)

    assert found == {"table", "head", "fill", "later"}
    assert closure(graph, found_effects, found, ["reader"]) == {"table", "head", "fill"}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_copied_ops_give_the_same_on_any_data(data, random_graphs, eager):
    """Inputs and parameters full of other numbers leave every copied tensor as it was."""
    graph = annotate(data.draw(random_graphs(14)), 3)
    found = duplicable(graph, effects(graph))
    first, second = eager(graph, 3), eager(graph, 3)
    for name in second.inputs:
        second.inputs[name] = torch.randn_like(second.inputs[name])
    for name, state in graph.state.items():
        if state.requires_grad:
            second.states[name] = torch.randn_like(second.states[name]).requires_grad_()
    one, other = first.run(), second.run()

    for name in (n for op in found for n in graph.op_of[op].outputs):
        if isinstance(one[name], torch.Tensor):
            torch.testing.assert_close(one[name], other[name])
        else:
            assert one[name] == other[name]


def test_a_size_that_one_mode_asks_for_ties_nothing_together(builder):
    """As stochastic depth asks for it in every block: each block is tied to itself alone."""
    b = builder(x=torch.randn(4, 8))
    size = b.method("size", Ref("x"), 0, name="size", mode=Mode.TRAIN)
    h = Ref("x")
    for block in range(3):
        b.add_module(f"layer{block}", nn.Linear, 8, 8)
        h = b.module(f"layer{block}", h)
        noise = b.call(torch.empty, size, 1, name=f"empty{block}", mode=Mode.TRAIN)
        noise = b.method("bernoulli_", noise, 0.5, name=f"noise{block}", mode=Mode.TRAIN)
        made = b.call(operator.mul, h, noise, name=f"mul{block}", mode=Mode.TRAIN)
        h = b.call(torch.relu, ByMode(made, h), name=f"relu{block}")
    graph = annotate(b.graph(h, b.method("sum", h)), 4)
    found_effects = effects(graph)
    found = duplicable(graph, found_effects)

    assert found == {"size"}
    assert {min(g) for g in atoms(graph, found_effects, found).groups if len(g) > 2} == {
        f"empty{block}" for block in range(3)
    }
