"""Traces of stages in which a block repeats, traced with four of the blocks.

Held against the same stage traced whole: equal, block for block and event for event, but for the
order of what ends together. What is not alike from block to block is seen, and traced whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stage_values import ends
from torch import nn

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.allocation_trace import AllocationTrace, StageTraces
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.runtime.spec import Precision

WIDTH = 8

OPS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.relu,
    torch.sin,
    lambda x: (x + 1).mul_(2),
    lambda x: x * x,
    lambda x: x.flatten(1).view(x.shape),
    lambda x: torch.cat(x.chunk(2, -1), -1),
    lambda x: x + x.mean(1, keepdim=True),
)


class Block(nn.Module):
    """Some layers in turn: one or two of its own, one that all may share, and ops without state."""

    def __init__(self, kinds: Sequence[int], shared: nn.Linear, dropout: float, skip: int) -> None:
        super().__init__()
        self.kinds = kinds
        self.skip = skip
        self.shared = shared
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for kind in kinds if kind == 0)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, before: torch.Tensor, mask: torch.Tensor) -> Any:
        own = iter(self.own)
        y = x * 1.5
        for kind in self.kinds:
            match kind:
                case 0:
                    y = next(own)(y)
                case 1:
                    y = self.shared(y)
                case 2:
                    y = self.norm(y)
                case 3:
                    y = self.dropout(y)
                case 4:
                    y = y * mask
                case _:
                    y = OPS[kind - 5](y)
        match self.skip:
            case 0:
                return y, x
            case 1:
                return x + y, x
            case 2:
                return y + before, x
            case _:
                return (x * 1).add_(y), before


class Stack(nn.Module):
    def __init__(
        self, count: int, kinds: Sequence[int], tied: bool, dropout: float, skip: int
    ) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mask = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Block(kinds, shared if tied else nn.Linear(WIDTH, WIDTH), dropout, skip)
            for _ in range(count)
        )
        self.last = shared if tied else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.sigmoid(self.mask(x))
        x, before = self.first(x), x * 2
        for block in self.blocks:
            x, before = block(x, before, mask)
        result: torch.Tensor = self.last(x)
        return result


def squares(output: Any, target: Any) -> torch.Tensor:
    result: torch.Tensor = (output - target).square().mean()
    return result


def stack(
    count: int, kinds: Sequence[int], *, tied: bool = False, dropout: float = 0.0, skip: int = 1
) -> Graph:
    model = Stack(count, kinds, tied, dropout, skip)
    x = torch.randn(4, 6, WIDTH)
    return trace(model, x, target=torch.randn(4, 6, WIDTH), loss_fn=squares)


def both(
    graph: Graph, names: Sequence[str], segments: Sequence[Sequence[str]] = (), *, split: bool
) -> tuple[StageTraces | None, StageTraces]:
    """The traces of a stage, expanded and as it is traced whole."""
    part = MemoryTraces(graph)._part(names, *ends(graph, names), None, segments)
    return (
        MemoryTraces(graph)._expanded(part, split=split),
        MemoryTraces(graph)._performed(part, split=split),
    )


def told(
    trace: AllocationTrace | None, *, anyhow: bool
) -> list[tuple[bool, list[tuple[int, int]]]]:
    """The events, what ends in a row in order of its numbers.

    Args:
        anyhow: whether what ends in a row may do so while any op is at work: a split backward lets
            go of what it needs no more in the order in which it lies in memory.
    """
    found = []
    for alive, group in itertools.groupby(trace or (), lambda event: event.alive):
        pairs = [(event.block, event.op) for event in group]
        if not alive:
            pairs = sorted((block, 0 if anyhow else op) for block, op in pairs)
        found.append((alive, pairs))
    return found


def assert_equal(one: StageTraces, other: StageTraces, *, split: bool) -> None:
    traces = ("forward", "first_backward", "backward", "first_weight", "weight")
    for name in (*traces, "forward_again"):
        a, b = getattr(one, name), getattr(other, name)
        assert told(a, anyhow=split) == told(b, anyhow=split), name
    nothing: dict[str, Any] = dict.fromkeys(traces)
    assert dataclasses.replace(one, **nothing) == dataclasses.replace(other, **nothing)
    assert list(one.blocks) == list(other.blocks)


@pytest.mark.parametrize(
    ("precision", "begin", "split"),
    [
        (Precision.FP32, 0, False),
        (Precision.FP32, 3, True),
        (Precision.BF16, 3, False),
    ],
)
def test_a_stage_of_many_blocks(precision: Precision, begin: int, split: bool) -> None:
    graph = annotate(stack(9, (0, 5, 3, 0, 2), dropout=0.1), 4, precision)
    ((stretch),) = graph.repeats
    names = [op.name for op in graph.ops][stretch.start + begin : stretch.end - 2]
    found, whole = both(graph, names, split=split)

    assert found is not None
    assert_equal(found, whole, split=split)


@pytest.mark.parametrize("split", [False, True])
def test_blocks_that_run_again(split: bool) -> None:
    graph = stack(10, (0, 5, 0, 2), dropout=0.1)
    ((stretch),) = graph.repeats
    names = [op.name for op in graph.ops]
    blocks = [
        names[at : at + stretch.period] for at in range(stretch.start, stretch.end, stretch.period)
    ]
    inside = names[stretch.start : stretch.end]
    for segments in (blocks, [block[1:4] for block in blocks], [inside]):
        found, whole = both(graph, inside, segments, split=split)
        assert split or found is not None
        if found is not None:
            assert_equal(found, whole, split=split)


def test_blocks_of_which_some_run_again_are_traced_whole() -> None:
    graph = stack(10, (0, 5, 0, 2))
    ((stretch),) = graph.repeats
    inside = [op.name for op in graph.ops][stretch.start : stretch.end]
    found, _ = both(graph, inside, [inside[: stretch.period]], split=False)
    some, _ = both(graph, inside, [inside[: 5 * stretch.period]], split=False)

    assert some is None
    assert found is not None  # the first block is none of those in the middle


class Alternating(nn.Module):
    """Layers in turn of few: which of them comes is not the same from block to block."""

    def __init__(self, count: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.count):
            x = torch.tanh(self.layers[number % len(self.layers)](x))
        return x


def test_weights_that_come_back_later_are_traced_whole() -> None:
    x = torch.randn(4, 6, WIDTH)
    model = Alternating(16, 5)
    graph = trace(model, x, target=torch.randn(4, 6, WIDTH), loss_fn=squares)
    names = [op.name for op in graph.ops]

    assert graph.repeats
    found, _ = both(graph, names, split=False)
    assert found is None


def test_running_statistics_are_traced_whole() -> None:
    layers = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(9)]
    x = torch.randn(4, 3, 5, 5)
    graph = trace(nn.Sequential(*layers), x, target=torch.randn(4, 3, 5, 5), loss_fn=squares)
    names = [op.name for op in graph.ops]

    assert graph.repeats
    found, _ = both(graph, names, split=False)
    assert found is None


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_any_stack_of_blocks(data: Any) -> None:
    found_some(data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=400, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_very_many_stacks_of_blocks(data: Any) -> None:
    found_some(data)


def found_some(data: Any) -> None:
    kinds = data.draw(st.lists(st.integers(0, 4 + len(OPS)), min_size=1, max_size=5))
    graph = stack(
        data.draw(st.integers(8, 12)),
        kinds,
        tied=data.draw(st.booleans()),
        dropout=data.draw(st.sampled_from((0.0, 0.1))),
        skip=data.draw(st.integers(0, 3)),
    )
    graph = annotate(graph, 4, data.draw(st.sampled_from((Precision.FP32, Precision.BF16))))
    names = [op.name for op in graph.ops]
    names = names[data.draw(st.integers(0, 12)) : len(names) - data.draw(st.integers(0, 12))]
    # What an op writes to lies in its stage and in its segment.
    groups = atoms(graph, effects(graph)).groups
    names = [name for name in names if not any(name in g and g - set(names) for g in groups)]
    segments: list[list[str]] = []
    if graph.repeats and data.draw(st.booleans()):
        stretch = graph.repeats[0]
        length = data.draw(st.integers(1, stretch.period))
        starts = range(stretch.start + data.draw(st.integers(0, 3)), stretch.end, stretch.period)
        every = [[op.name for op in graph.ops[at : at + length]] for at in starts]
        segments = [
            one
            for one in every
            if set(one) <= set(names) and not any(g & set(one) and g - set(one) for g in groups)
        ]
    split = data.draw(st.booleans())
    found, whole = both(graph, names, segments, split=split)
    if found is not None:
        assert_equal(found, whole, split=split)
