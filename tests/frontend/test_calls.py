"""Calls of torch have one form in a graph, however they were spelt, and compute what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gpipe_compiler.frontend.recorder import Recorder

Function = Callable[[Tensor, Tensor], object]

SPELLINGS: Sequence[tuple[Function, ...]] = (
    (
        lambda x, y: x + y,
        lambda x, y: x.add(y),
        torch.add,
        lambda x, y: torch.add(x, other=y),
        lambda x, y: torch.add(input=x, other=y, alpha=1),
    ),
    (lambda x, _: x**2, lambda x, _: x.pow(2), lambda x, _: torch.pow(x, 2)),
    (lambda x, _: 2**x, lambda x, _: x.__rpow__(2)),
    (lambda x, _: 1 - x, lambda x, _: x.__rsub__(1)),
    (lambda x, y: x @ y.T, lambda x, y: torch.matmul(x, y.T), lambda x, y: x.matmul(y.T)),
    (lambda x, y: x / y, torch.div, lambda x, y: x.true_divide(y)),
    (
        lambda x, _: x.sum(1),
        lambda x, _: x.sum(dim=1),
        lambda x, _: x.sum([1]),
        lambda x, _: torch.sum(x, dim=(1,), keepdim=False),
    ),
    (
        lambda x, _: x.view(2, 12),
        lambda x, _: x.view((2, 12)),
        lambda x, _: x.view([2, 12]),
        lambda x, _: x.view(torch.Size((2, 12))),
        lambda x, _: x.view(size=(2, 12)),
    ),
    (
        lambda x, _: x.permute(1, 0),
        lambda x, _: x.permute((1, 0)),
        lambda x, _: torch.permute(x, dims=(1, 0)),
    ),
    (
        lambda x, _: x.to(torch.float32),
        lambda x, _: x.to(dtype=torch.float32),
        lambda x, _: x.type(torch.float32),
    ),
    (
        lambda x, _: F.softmax(x, 1),
        lambda x, _: F.softmax(x, dim=1),
        lambda x, _: F.softmax(input=x, dim=1, dtype=None),
    ),
    (
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.where(x > 0, y),
        lambda x, y: torch.where(condition=x > 0, input=x, other=y),
        lambda x, y: x.where(other=y, condition=x > 0),
    ),
    (
        lambda x, y: x.masked_fill(y > 0, 0.5),
        lambda x, y: torch.masked_fill(x, y > 0, value=0.5),
    ),
    (lambda x, _: x[1:], lambda x, _: x[1:, :], lambda x, _: x.__getitem__(slice(1, None))),
    (lambda x, _: x.relu(), lambda x, _: torch.relu(x)),
    (
        lambda x, _: F.dropout(x, 0.5, False),
        lambda x, _: F.dropout(x, training=False),
        lambda x, _: F.dropout(x, p=0.5, training=False, inplace=False),
    ),
    (
        lambda x, y: torch.cat((x, y), 1),
        lambda x, y: torch.cat([x, y], dim=1),
        lambda x, y: torch.concat((x, y), -1 + 2),
    ),
    (lambda x, _: x.clamp(0, 1), lambda x, _: torch.clamp(x, min=0, max=1)),
    (lambda x, _: x.chunk(2, -1), lambda x, _: torch.chunk(x, 2, dim=-1)),
)


def recorded(function: Function, x: Tensor, y: Tensor) -> fx.Graph:
    """The graph of a function; the tensors of what it returns are its output."""
    recorder = Recorder()
    recorder.tensors.input("x", x)
    recorder.tensors.input("y", y)
    with recorder:
        returned = function(x, y)
    recorder.finish(returned)
    return recorder.graph


def pair() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6), torch.randn(4, 6)


def calls(graph: fx.Graph) -> list[str]:
    return [node.format_node() or str(node.args) for node in graph.nodes]


@pytest.mark.parametrize("spellings", SPELLINGS)
def test_one_call_has_one_form(spellings: Sequence[Function]) -> None:
    first, *others = (recorded(function, *pair()) for function in spellings)

    for other in others:
        assert calls(other) == calls(first)


@pytest.mark.parametrize("function", [one for spellings in SPELLINGS for one in spellings])
def test_its_form_computes_the_same(function: Function) -> None:
    graph = recorded(function, *pair())

    made = fx.GraphModule(nn.Module(), graph)(*pair())

    expected = function(*pair())
    expected = list(expected) if isinstance(expected, tuple) else expected
    made = list(made) if isinstance(made, tuple | list) else made
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
