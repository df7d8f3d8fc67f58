"""Graphs of aten operators become graphs that a person would write, and compute the same."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from gpipe_compiler.frontend.aten_to_python import aten_to_python, merge_indexing
from gpipe_compiler.frontend.exported import trace_export
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import FunctionCall, MethodCall

aten = torch.ops.aten
CPU = torch.device("cpu")
X = torch.randn(2, 4, 6)


class Indexed(nn.Module):
    def forward(self, x):
        rows = torch.arange(x.shape[1])
        return [
            *(x[:, 0], x[..., 1:3], x[:, None, 1], x[0], x[:, 1:, ::2], x[:, :]),
            *(x[:, -1, 2:], x[:, 1:][:, 1], x[:, :, 1].unsqueeze(0), x[:, rows, :2]),
            *(x[:, 1, None], x[None, ..., None], x.select(2, -1)),
        ]


def test_index_expressions_are_merged_and_right(same_as_eager):
    subject = Subject("m", Indexed(), (torch.randn(4, 5, 6),), training=False)
    graph = trace_export(subject, False)

    same_as_eager(graph, subject, False)
    names = [str(op.call.function) for op in graph.ops if isinstance(op.call, FunctionCall)]
    assert not [name for name in names if "aten" in name]
    indices = [op.call.args[1] for op in graph.ops if getattr(op.call, "function", 0) is GET]
    whole = slice(None)
    assert indices[:4] == [
        (whole, 0),
        (..., slice(1, 3)),
        (whole, None, 1),
        0,
    ]


GET = operator.getitem


def test_view_that_is_read_twice_keeps_its_name():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    part = graph.call_function(aten.slice.Tensor, (x, 1, 1, 3))
    part.meta["val"] = X[:, 1:3]
    row = graph.call_function(aten.select.int, (part, 1, 0))
    graph.output((part, row))
    merge_indexing(graph)

    found = [(node.target, node.args[1:]) for node in graph.nodes if node.op == "call_function"]
    assert found == [(GET, ((slice(None), slice(1, 3)),)), (GET, ((slice(None), 0),))]


def test_write_between_two_views_keeps_them_apart():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    part = graph.call_function(aten.slice.Tensor, (x, 1, 1, 3))
    part.meta["val"] = X[:, 1:3]
    graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((graph.call_function(aten.select.int, (part, 2, 0)),))
    aten_to_python([graph])

    targets = [node.target for node in graph.nodes if node.op.startswith("call")]
    assert targets == [GET, "add_", GET]


class Filled(nn.Module):
    def forward(self, x):
        found, part = torch.zeros_like(x), torch.zeros(2)
        found[:, 1:] = x[:, :-1] * 2
        found[:, 0] = x[:, 1].sum(-1, keepdim=True)
        row = part[:1]
        row.copy_(x.flatten()[:1])
        return found, row


def test_parts_that_are_only_stored_into_are_assigned(same_as_eager):
    subject = Subject("m", Filled(), (torch.randn(4, 5, 6),), training=False)
    graph = trace_export(subject, False)

    same_as_eager(graph, subject, False)
    called = [getattr(op.call, "function", getattr(op.call, "method", "")) for op in graph.ops]
    assert called.count(operator.setitem) == 2
    assert called.count("copy_") == 1  # its part is read afterwards


class Sizes(nn.Module):
    def forward(self, x):
        b, t, _ = x.shape
        half = (b * t) // 2 + max(t, 2)
        return x.reshape(b * t, -1) * half, torch.zeros(b, t), x.new_ones(t, b), x.numel() + x


def test_sizes_are_numbers_at_run_time(same_as_eager):
    subject = Subject("m", Sizes(), (torch.randn(4, 5, 6),), training=False)
    graph = trace_export(subject, False)

    same_as_eager(graph, subject, False)
    assert any(isinstance(op.call, MethodCall) and op.call.method == "size" for op in graph.ops)


class Factories(nn.Module):
    def forward(self, x):
        table = torch.arange(6, device=x.device, dtype=x.dtype) + torch.tensor([0.1, 0.2]).sum()
        return x * table + torch.full((6,), 2.0, device="cpu") + x.to("cpu")


def test_new_tensors_are_made_on_the_device_of_the_trace(same_as_eager):
    subject = Subject("m", Factories(), (torch.randn(4, 6),), training=False)
    graph = trace_export(subject, False)

    same_as_eager(graph, subject, False)
    devices = [op.call.kwargs.get("device") for op in graph.ops]
    assert devices.count(CPU) == 3
    assert not [op for op in graph.ops if getattr(op.call, "method", "") == "to"]
    assert not [name for name, state in graph.state.items() if state.kind.value == "constant"]


def test_new_tensors_of_a_meta_model_are_on_meta():
    with torch.device("meta"):
        x = torch.randn(4, 6)
    graph = trace_export(Subject("m", Tabled(), (x,), training=False), False)

    devices = [op.call.kwargs.get("device") for op in graph.ops]
    assert devices.count(torch.device("meta")) == 1


class Tabled(nn.Module):
    def forward(self, x):
        return x + torch.arange(6, device=x.device)


class Checks(nn.Module):
    def forward(self, x):
        torch._check(x.shape[0] > 0)
        assert x.shape[1] == 6
        return x.float().to(torch.float32) + 1


def test_checks_of_the_trace_are_dropped():
    graph = trace_export(Subject("m", Checks(), (torch.randn(4, 6),), training=False), False)

    assert [op.name for op in graph.ops] == ["float_", "to", "add"]
