"""Static plans, held against the best that trying every order of placement finds."""

from __future__ import annotations

import itertools
import operator

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_compiler.ir import Ref
from gpipe_compiler.passes.offsets import (
    Alignment,
    Lifetime,
    in_forward,
    in_training,
    place,
)
from gpipe_compiler.passes.rehearsal import rehearse
from gpipe_compiler.passes.shapes import annotate

LIVES = st.builds(
    lambda size, born, length: Lifetime(size, born, born + length),
    st.integers(1, 2000),
    st.integers(0, 20),
    st.integers(1, 12),
)


@given(lives=st.lists(LIVES, max_size=25), alignment=st.sampled_from(Alignment))
def test_blocks_that_live_at_a_time_do_not_overlap(lives, alignment):
    plan = place(lives, alignment)

    spans = list(zip(plan.lifetimes, plan.offsets, strict=True))
    for (one, at), (other, there) in itertools.combinations(spans, 2):
        both = max(one.born, other.born) < min(one.dies, other.dies)
        assert not both or at + one.bytes <= there or there + other.bytes <= at
    assert all(offset % alignment == 0 for offset in plan.offsets)
    sizes = [-(-life.bytes // alignment) * alignment for life in lives]
    needed = [range(life.born, life.dies) for life in lives]
    live = [sum(s for s, span in zip(sizes, needed, strict=True) if m in span) for m in range(40)]
    assert plan.lower_bound == max(live)
    assert plan.lower_bound <= plan.planned <= plan.no_reuse


@given(lives=st.lists(LIVES, max_size=5))
def test_tiny_cases_are_near_the_best_arena(lives):
    """Any arena arises from placing its blocks one by one, each as low as it goes."""
    plan = place(lives)

    best = min((_height(order) for order in itertools.permutations(lives)), default=0)

    assert plan.lower_bound <= best <= plan.planned <= 2 * best


def _height(order: tuple[Lifetime, ...]) -> int:
    placed: list[tuple[Lifetime, int, int]] = []
    for life in order:
        size = -(-life.bytes // 64) * 64
        taken = [
            (start, end)
            for other, start, end in placed
            if max(life.born, other.born) < min(life.dies, other.dies)
        ]
        starts = [0, *(end for _, end in taken)]
        lowest = min(
            start
            for start in starts
            if all(start + size <= low or high <= start for low, high in taken)
        )
        placed.append((life, lowest, lowest + size))
    return max((end for _, _, end in placed), default=0)


def test_a_chain_takes_its_two_largest_neighbours(builder):
    """By hand: 1024, 2048, 512 and 256 bytes in a row, each dead once the next one is there."""
    b = builder(x=torch.randn(2, 64))
    h = Ref("x")
    for number, (width, out) in enumerate(((64, 128), (128, 256), (256, 64), (64, 32))):
        b.add_module(f"fc{number}", nn.Linear, width, out)
        h = b.module(f"fc{number}", h)
    graph = annotate(b.graph((h,)), 2)

    names = [op.name for op in graph.ops]
    plan = place(in_forward(rehearse(graph, names, ["x"], graph.output_values)))

    given = 512
    assert plan.no_reuse == given + 1024 + 2048 + 512 + 256
    assert plan.planned == plan.lower_bound == given + 1024 + 2048


def test_a_training_step_holds_what_autograd_keeps(builder):
    b = builder(x=torch.randn(2, 64))
    h = Ref("x")
    for number in range(5):
        b.add_module(f"fc{number}", nn.Linear, 64, 64)
        h = b.call(torch.sigmoid, b.module(f"fc{number}", h))
    loss = b.method("sum", b.call(operator.mul, h, h))
    graph = annotate(b.graph((h,), loss), 2)
    names = [op.name for op in graph.ops]

    tapes = rehearse(graph, names, ["x"], graph.output_values)
    trained, forward = place(in_training(tapes)), place(in_forward(tapes))

    assert trained.lower_bound >= forward.lower_bound
    assert trained.no_reuse > trained.planned >= trained.lower_bound
    inference = annotate(graph.replace(loss=None, values={}), 2)
    served = rehearse(inference, names, ["x"], graph.output_values)
    assert place(in_forward(served)).lower_bound < forward.lower_bound
