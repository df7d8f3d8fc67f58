"""Repeated blocks, compared with what each pass says of the same graph op by op.

The graphs are built by hand or drawn at random: a prelude, one block many times, an end. Where a
block is and how often is known from the building; what holds of every op, from the passes
themselves, with the stretches taken away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST
from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph, Ref, Stretch
from gpipe_compiler.ir.repeats import ShortenedGraph, repeats
from gpipe_compiler.passes import shapes
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.distinct import distinct
from gpipe_compiler.passes.duplicate import duplicable, shape_values
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.passes.shapes import annotate

WIDTH = 4
Step = tuple[str, int, int]

KINDS = (
    *("linear", "shared", "relu", "relu_", "add", "add_", "view", "half", "split", "dropout"),
    *("count", "scale", "ones", "batch", "transposed"),
)


def chain(builder: type, blocks: list[list[Step]], prelude: int = 1) -> Graph:
    """Blocks one after another; a block's first values are the last two of the one before."""
    torch.manual_seed(1)
    b = builder(x=torch.randn(4, WIDTH), y=torch.randn(4, WIDTH))
    b.add_module("norm", nn.BatchNorm1d, WIDTH)
    counter = b.add_state("counter", torch.zeros(WIDTH))
    scale = b.add_state("scale", torch.full((WIDTH,), 1.5))
    last = [Ref("x"), Ref("y")]
    for number in range(prelude):
        b.add_module(f"before{number}", nn.Linear, WIDTH, WIDTH)
        last[1] = b.module(f"before{number}", last[1])
    mask = b.call(operator.mul, Ref("x"), 2.0)
    for block, steps in enumerate(blocks):
        values = list(last)
        for number, (kind, first, second) in enumerate(steps):
            u, v = values[first % len(values)], values[second % len(values)]
            match kind:
                case "linear" | "wide":
                    path = f"blocks.{block}.linear{number}"
                    b.add_module(path, nn.Linear, WIDTH, WIDTH, bias=kind == "linear")
                    values.append(b.module(path, u))
                case "shared":
                    values.append(b.module("norm", u))
                case "relu":
                    values.append(b.call(torch.relu, u))
                case "relu_":
                    values.append(b.call(torch.relu_, u))
                case "add":
                    values.append(b.call(operator.add, u, v))
                case "add_":
                    values.append(b.method("add_", u, v))
                case "view":
                    values.append(b.method("view_as", u, u))
                case "half":
                    half = b.call(operator.getitem, u, (slice(None), slice(0, 2)))
                    b.method("mul_", half, 0.5)
                case "split":
                    left, right = b.method("chunk", u, 2, 1, results=2)
                    values.append(b.call(torch.cat, [right, left], 1))
                case "dropout":
                    values.append(b.call(F.dropout, u, 0.5))
                case "count":
                    b.method("add_", counter, b.method("mean", b.method("detach", u), 0))
                case "scale":
                    values.append(b.call(operator.mul, u, scale))
                case "mask":
                    values.append(b.call(operator.mul, u, mask))
                case "ones":
                    table = b.call(torch.ones, b.method("size", u, 0), WIDTH)
                    values.append(b.call(operator.add, v, table))
                case "batch":
                    size = b.call(operator.getitem, b.call(getattr, u, "shape"), 0)
                    values.append(b.call(operator.truediv, v, size))
                case "transposed":
                    tall = b.method("contiguous", b.method("t", u))
                    values.append(b.method("t", tall))
        last = values[-2:]
    loss = b.method("sum", b.call(operator.add, *last))
    return b.graph(tuple(last), loss)


def plainly(graph: Graph, batch_size: int) -> Graph:
    """The graph annotated without any sharing."""
    with mock.patch.object(shapes, "repeats", return_value=()):
        return annotate(graph, batch_size)


def hold_all_passes(graph: Graph, batch_size: int) -> tuple[Stretch, ...]:
    """Every table of every pass with sharing against the one without."""
    plain, shared = plainly(graph, batch_size), annotate(graph, batch_size)
    assert plain.repeats == ()
    assert list(plain.values.items()) == list(shared.values.items())
    assert plain.held == shared.held
    assert effects(plain) == effects(shared)
    assert saved_tensors(plain) == saved_tensors(shared)
    assert roofline(plain, DEFAULT_HOST) == roofline(shared, DEFAULT_HOST)
    assert random_ops(plain) == random_ops(shared)
    assert mixing_ops(plain) == mixing_ops(shared)
    assert shape_values(plain) == shape_values(shared)
    assert duplicable(plain, effects(plain)) == duplicable(shared, effects(shared))
    return shared.repeats


RESIDUAL: list[Step] = [
    ("linear", 1, 0),
    ("relu", 2, 0),
    ("dropout", 3, 0),
    ("linear", 4, 0),
    ("add", 1, 5),
]


def test_a_chain_of_equal_blocks_is_one_stretch(builder: type) -> None:
    graph = chain(builder, [RESIDUAL] * 12, prelude=3)
    (found,) = hold_all_passes(graph, 2)

    # What the first block reads is made by no block, so that it may stand apart.
    assert found.period == len(RESIDUAL)
    assert found.count in (11, 12)
    assert 4 <= found.start <= 4 + len(RESIDUAL)


def test_each_distinct_op_of_the_blocks_is_met_once(builder: type) -> None:
    graph = annotate(chain(builder, [RESIDUAL] * 40), 2)
    blocks = ShortenedGraph.of(graph)
    assert blocks is not None

    groups = [names for _, names in distinct(graph)]

    assert len(blocks.short.ops) < 10 * len(RESIDUAL)
    assert sorted(name for names in groups for name in names) == sorted(graph.op_of)
    assert max(map(len, groups)) >= 80  # both linear layers of all blocks at once


@pytest.mark.parametrize("place", [0, 5, 13, 25])
def test_one_other_layer_ends_a_stretch(builder: type, place: int) -> None:
    other: list[Step] = [("wide", 1, 0), *RESIDUAL[1:]]
    blocks = [RESIDUAL] * 26
    blocks[place] = other

    found = hold_all_passes(chain(builder, blocks), 2)

    first = 2 + place * len(RESIDUAL)  # the other layer's place
    assert all(not s.start <= first < s.end for s in found)
    assert {s.period for s in found} == {len(RESIDUAL)}
    assert sum(s.count for s in found) >= (24 if place in (0, 25) else 18 if place == 5 else 22)


def test_values_that_all_blocks_read_are_no_hindrance(builder: type) -> None:
    graph = chain(builder, [[*RESIDUAL, ("mask", -1, 0), ("scale", -1, 0)]] * 12)

    assert len(hold_all_passes(graph, 2)) == 1


class Guarded(nn.Module):
    """A layer, part of which is not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = torch.sin(x * 2.0) * self.gain
        return self.linear(y) + x


def test_blocks_with_regions_of_their_own_repeat() -> None:
    model = nn.Sequential(*(Guarded() for _ in range(10)))
    x = torch.randn(4, WIDTH)
    graph = trace(model, x, target=x, loss_fn=F.mse_loss)

    assert len({region for op in graph.ops for region in op.regions}) == 10
    (found,) = hold_all_passes(graph.replace(repeats=()), 2)
    assert found.count >= 9


def test_blocks_whose_results_are_all_read_at_the_end_are_left_alone(builder: type) -> None:
    b = builder(x=torch.randn(2, WIDTH))
    value, seen = Ref("x"), []
    for _ in range(20):
        value = b.call(torch.relu, value)
        seen.append(value)
    graph = b.graph(b.call(torch.cat, seen, 1))

    assert repeats(graph) == ()
    assert hold_all_passes(graph, 2) == ()


def test_what_grows_from_block_to_block_is_not_shared(builder: type) -> None:
    """The ops are alike, but each block doubles the width of what it is given."""
    b = builder(x=torch.randn(2, 1))
    value = Ref("x")
    for _ in range(10):
        value = b.call(torch.cat, [value, value], 1)
    graph = b.graph(value)

    assert repeats(graph) == (Stretch(1, 1, 9),)  # the first reads the input twice
    assert hold_all_passes(graph, 2) == ()
    assert annotate(graph, 2).values[value.name].shape == (2, 1024)


def test_what_changes_its_layout_from_block_to_block_is_not_shared(builder: type) -> None:
    """Sizes and types are alike, but every other block is given a transposed tensor."""
    b = builder(x=torch.randn(4, 4))
    value = Ref("x")
    for _ in range(13):
        value = b.call(torch.transpose, value, 0, 1)
    graph = b.graph(value, unbatched=("x",))

    assert hold_all_passes(graph, 4) == ()


def test_the_same_state_in_other_places_is_another_block(builder: type) -> None:
    """A block uses one weight twice, the next one two weights of the same shape."""

    def wired(same: Callable[[int], bool]) -> Graph:
        b = builder(x=torch.randn(2, WIDTH))
        value = Ref("x")
        for block in range(24):
            one = b.add_state(f"{block}.one", torch.randn(WIDTH, WIDTH), trainable=True)
            two = b.add_state(f"{block}.two", torch.randn(WIDTH, WIDTH), trainable=True)
            value = b.call(torch.matmul, value, one)
            value = b.call(torch.matmul, value, one if same(block) else two)
            value = b.call(torch.relu, value)
        return b.graph(value, b.method("sum", value))

    assert [s.count for s in repeats(wired(lambda _: True))] == [23]  # the first reads x
    found = repeats(wired(lambda block: block < 12))
    assert sum(s.count for s in found) <= 24
    assert len(found) == 2


@settings(deadline=None, max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30)),
        min_size=1,
        max_size=6,
    ),
    count=st.integers(8, 11),
    prelude=st.integers(0, 2),
)
@example(steps=[("add_", 1, 0)], count=9, prelude=1)
@example(steps=[("view", 1, 0), ("relu", 2, 0)], count=9, prelude=0)
@example(steps=[("half", 1, 0), ("count", 1, 0)], count=9, prelude=1)
@example(steps=[("linear", 1, 0), ("shared", 2, 0), ("relu_", 3, 0)], count=10, prelude=1)
def test_any_block_is_described_as_without_sharing(
    builder: type, steps: list[Step], count: int, prelude: int
) -> None:
    graph = chain(builder, [steps] * count, prelude)
    try:
        plainly(graph, 2)
    except Exception:
        assume(False)  # a write in place that autograd refuses
    hold_all_passes(graph, 2)
