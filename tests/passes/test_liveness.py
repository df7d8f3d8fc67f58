"""Live ranges, compared with a recomputation from the definition."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.ir import Ref
from gpipe_compiler.passes.liveness import LiveRange, liveness
from gpipe_compiler.passes.shapes import annotate


def naive_live(graph, order, position):
    """Made before the position and read at it or later; the definition, word by word."""
    made = {source.name for source in graph.inputs}
    for name in order[:position]:
        made.update(graph.op_of[name].outputs)
    needed = set(graph.output_values) | ({graph.loss.value} if graph.loss else set())
    for name in order[position:]:
        needed.update(graph.op_of[name].inputs)
    return made & needed


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_live_values_are_those_of_the_definition(data, random_graphs):
    graph = annotate(data.draw(random_graphs()), 2)
    order = [op.name for op in graph.ops]
    found = liveness(graph)

    assert len(found.live) == len(found.bytes) == len(order) + 1
    for position in range(len(order) + 1):
        expected = naive_live(graph, order, position)
        assert found.live[position] == expected
        assert {n for n, span in found.ranges.items() if span.at(position)} == expected
        by_storage = {}
        for name in expected:
            value = graph.values[name]
            family = [n for n, v in graph.values.items() if v.storage == value.storage]
            by_storage[value.storage] = graph.values[family[0]].bytes
        if not any("chunk" in n for n in expected):  # parts of one op add up instead
            assert found.bytes[position] == sum(by_storage.values())


def test_another_legal_order_has_other_ranges(builder):
    b = builder(x=torch.randn(3, 4))
    first = b.call(torch.relu, Ref("x"), name="first")
    second = b.call(torch.tanh, Ref("x"), name="second")
    b.call(torch.exp, first, name="third")
    graph = annotate(b.graph((Ref("third"), second)), 3)
    assert liveness(graph).ranges["first"] == LiveRange(0, 2)

    moved = liveness(graph, ["first", "third", "second"])

    assert moved.ranges["first"] == LiveRange(0, 1)
    assert moved.ranges["second"] == LiveRange(2, 3)
    assert moved.ranges["x"] == LiveRange(-1, 2)


def test_views_weigh_once_and_hold_the_whole(builder):
    b = builder(x=torch.randn(2, 4))
    whole = b.call(torch.relu, Ref("x"), name="whole")
    part = b.method("narrow", whole, 1, 0, 1, name="part")
    left, right = b.method("chunk", b.method("exp", part), 1, 1, results=1)[0], part
    graph = annotate(b.graph((left, right)), 2)
    found = liveness(graph)

    assert found.live[2] == {"part"}
    assert found.bytes[2] == 2 * 4 * 4
    assert found.bytes[0] == 2 * 4 * 4
    assert found.peak == max(range(len(found.bytes)), key=found.bytes.__getitem__)


def test_an_order_that_is_no_permutation_is_refused(convnet):
    names = [op.name for op in convnet.ops]
    random.Random(0).shuffle(names)
    with pytest.raises(ValueError, match="exactly once"):
        liveness(annotate(convnet, 2), names[1:])


def test_a_graph_without_values_is_refused(convnet):
    with pytest.raises(ValueError, match="annotate"):
        liveness(convnet)
