"""Blocks of models: found by hand in small models, and by definition in random ops."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import FunctionCall, Graph, ModuleCall, Op, Ref, called
from gpipe_compiler.ir.blocks import BlockCall, Body, Part, ShapeReads, calls_in, nest, ops_of
from gpipe_compiler.ir.classes import MethodBlocks, Methods, find_blocks
from gpipe_compiler.ir.contents import Contents
from gpipe_compiler.ir.forms import states_read
from gpipe_compiler.passes.duplicate import shape_values


class Conv(nn.Module):
    def __init__(self, channels: int, out: int, size: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, size, padding=size // 2)
        self.slope = 0.1 * size

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.conv(x), self.slope) + 1


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = Conv(4, 4)
        self.wide = Conv(4, 4, 3)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.narrow(x) * self.scale + self.wide(y)


class Model(nn.Module):
    """Equal cells, one called twice, and one of which the model reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv(3, 4)
        self.cells = nn.ModuleList(Cell() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        y = self.cells[0](first, first)
        y = self.cells[1](y, first)
        y = self.cells[2](y, first)
        y = y.relu()
        return self.cells[1](y, first) * self.cells[2].scale


def blocks_of(graph: Graph) -> MethodBlocks:
    ops = tuple(op for op in graph.ops if op.name not in graph.loss_only)
    modules = dict.fromkeys(op.call.module for op in ops if isinstance(op.call, ModuleCall))
    states = dict.fromkeys(name for op in ops for name in states_read(op))
    contents = Contents(graph, tuple(modules), tuple(states))
    body = Body(ops, graph.output_values)
    methods = Methods(contents, [body], graph.module_classes)
    (found,) = find_blocks([methods], ShapeReads(graph, {}))
    return found


def test_the_blocks_of_a_model() -> None:
    """Equal modules are one block; what differs between them are its parameters."""
    graph = trace(Model(), torch.rand(2, 3, 8, 8), training=False)

    found = blocks_of(graph)

    classes = {block.paths: block for block in found.classes}
    convs = (
        "stem",
        *(f"cells.{index}.{which}" for index in range(3) for which in ("narrow", "wide")),
    )
    assert set(classes) == {convs, ("cells.1", "cells.2", "cells.0")}
    conv = classes[convs]
    assert conv.user == "Conv"
    values = {parameter.name: list(parameter.values.values()) for parameter in conv.parameters}
    assert values["in_channels"] == [3, 4, 4, 4, 4, 4, 4]
    assert values["kernel_size"] == [1, 1, 3, 1, 3, 1, 3]
    slopes = next(v for v in values.values() if isinstance(v[0], float))
    assert all(map(math.isclose, slopes, [0.1, 0.1, 0.3, 0.1, 0.3, 0.1, 0.3]))
    cells = classes["cells.1", "cells.2", "cells.0"]
    assert [call.path for call in cells.calls] == ["cells.1", "cells.2", "cells.1", "cells.0"]
    assert [len(set(call.inputs)) for call in cells.calls] == [2, 2, 2, 1]
    assert all(len(call.inputs) == 2 for call in cells.calls)
    assert not cells.parameters
    (body,) = found.bodies
    assert [part.path for part in body if isinstance(part, BlockCall)] == [
        *("stem", "cells.0", "cells.1", "cells.2", "cells.1"),
    ]


class Twice(nn.Module):
    """Calls of one module that differ in what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Conv(4, 4)
        self.other = Conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.cell.slope = 0.1
        x = self.cell(x)
        x = self.other(x)
        self.cell.slope = 0.2
        return self.cell(x)


def test_a_module_whose_calls_differ_is_open() -> None:
    graph = trace(Twice(), torch.rand(2, 4, 8, 8), training=False)

    found = blocks_of(graph)

    assert set(found.of_path) == {"other"}


NOTHING_READ = ShapeReads(Graph("nothing", (), (), (), {}, {}, 1), {})
"""Of ops none of which asks for a size."""

PATHS = ("", "a", "a.b", "a.b.c", "a.d", "e", "e.0", "e.1")


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Body, frozenset[str]]:
    """Ops of random modules on random values made before, and modules that are blocks."""
    ops: list[Op] = []
    values = ["x"]
    for index in range(draw(st.integers(1, 12))):
        path = draw(st.sampled_from(PATHS))
        args = tuple(Ref(draw(st.sampled_from(values))) for _ in range(2))
        ops.append(Op(f"op{index}", FunctionCall(torch.add, args), f"v{index}", module=path))
        values.append(f"v{index}")
    returns = draw(st.lists(st.sampled_from(values[1:]), unique=True, max_size=2))
    blocks = draw(st.frozensets(st.sampled_from(PATHS[1:])))
    return Body(tuple(ops), tuple(returns)), blocks


@given(bodies())
def test_calls_hold_what_their_modules_run(drawn: tuple[Body, frozenset[str]]) -> None:
    """Every op once, in order, in a call of each block around it; no call goes on in the next."""
    body, blocks = drawn

    parts = nest(body, blocks.__contains__, shapes=NOTHING_READ)

    assert tuple(ops_of(parts)) == body.ops
    _hold(parts, "", blocks)


def _hold(parts: tuple[Part, ...], around: str, blocks: frozenset[str]) -> None:
    for part, after in zip(parts, (*parts[1:], None), strict=True):
        if isinstance(part, BlockCall):
            assert part.path in blocks
            assert part.path.startswith(f"{around}." if around else "")
            assert not (isinstance(after, BlockCall) and after.path == part.path)
            _hold(part.parts, part.path, blocks)
        else:
            words = part.module.split(".")
            inside = [".".join(words[:count]) for count in range(1, len(words) + 1)]
            assert [path for path in inside if path in blocks][-1:] == [around] * bool(around)


@given(bodies())
def test_calls_are_given_what_is_made_outside(drawn: tuple[Body, frozenset[str]]) -> None:
    """By definition: inputs are read inside and made outside, outputs the other way round."""
    body, blocks = drawn

    for call in calls_in(nest(body, blocks.__contains__, shapes=NOTHING_READ)):
        inside = list(call.ops)
        made = {op.result for op in inside}
        outside = [op for op in body.ops if op not in inside]
        assert set(call.inputs) == {v for op in inside for v in op.inputs} - made
        later = {v for op in outside for v in op.inputs}.union(body.returns)
        assert set(call.outputs) == made & later
        assert len(set(call.inputs)) == len(call.inputs)


class Rows(nn.Module):
    """Asks what it is given for its size, and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.lift(x)
        rows = torch.cat([made, made], 1)
        return rows.reshape(x.shape[0], 2 * x.shape[1], -1)[:, : x.shape[1]]


def test_a_size_of_what_a_call_is_given_is_read_by_itself() -> None:
    """Be it asked for in the call, or at the start, as those of inputs are: the calls are equal."""
    model = nn.Sequential(Rows(), nn.Conv1d(6, 6, 3, stride=2, padding=1), nn.Linear(2, 4), Rows())
    graph = trace(model, torch.rand(2, 6, 4), loss_fn=lambda y, _: y.sum(), target=0)
    templates = shape_values(graph)
    body = Body(graph.ops, graph.output_values)
    parts = nest(body, {"0", "3"}.__contains__, shapes=ShapeReads(graph, templates))

    calls = list(calls_in(parts))
    assert [call.path for call in calls] == ["0", "3"]
    for call in calls:
        assert not any(called(op.call) == "size" for op in call.ops)
        tensors = [value for value in call.inputs if value not in templates]
        assert ShapeReads(graph, templates).passed(call) == tensors
