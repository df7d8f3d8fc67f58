"""Descriptions of values, compared with eager tensors."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import ByMode, Mode, Ref, ValueKind
from gpipe_compiler.passes.shapes import annotate


def storages(values: dict[str, object]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(group) for group in groups.values()}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), known=st.booleans())
def test_descriptions_equal_the_eager_tensors(data, known, random_graphs, eager):
    """Shape, dtype, need of a gradient and shared storage are those of a real run.

    So they are where the values are known at another size already.
    """
    graph = data.draw(random_graphs())
    graph = annotate(annotate(graph, 8) if known else graph, 5)
    truth = eager(graph, 5).run()
    larger = eager(graph, 15).run()

    assert truth.keys() == graph.values.keys()
    for name, value in graph.values.items():
        tensor = truth[name]
        if value.kind is not ValueKind.TENSOR:
            assert not isinstance(tensor, torch.Tensor)
            continue
        expected = list(tensor.shape)
        if value.batch_dim is not None:
            expected[value.batch_dim] *= 3
        assert (value.shape, value.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert tuple(expected) == tuple(larger[name].shape)
        assert value.requires_grad == tensor.requires_grad, name
    numbered: dict[int, set[str]] = {}
    for name, value in graph.values.items():
        if value.kind is ValueKind.TENSOR:
            numbered.setdefault(value.storage, set()).add(name)
    assert storages(truth) == set(map(frozenset, numbered.values()))


def test_a_convolutional_network_is_described(convnet):
    graph = annotate(convnet, 7)

    relu = graph.values["b_relu"]
    assert (relu.shape, relu.batch_dim, relu.requires_grad) == ((7, 6, 8, 8), 0, True)
    assert graph.values["loss"].batch_dim is None
    assert not graph.values["image"].requires_grad
    assert graph.values["target"].dtype is torch.int64
    assert graph.values["b_conv"].storage == graph.values["b_relu"].storage
    assert graph.values["a_relu"].storage != graph.values["b_relu"].storage
    assert graph.batch_size == 7


def test_a_batch_by_batch_matrix_does_not_split(builder):
    b = builder(x=torch.randn(3, 4))
    transposed = b.method("t", Ref("x"), name="transposed")
    b.call(torch.matmul, Ref("x"), transposed, name="square")
    rows = b.method("repeat", Ref("x"), 2, 1, name="rows")
    b.call(torch.cat, [Ref("x"), b.call(torch.ones, 1, 4)], name="one_more")
    graph = annotate(b.graph(rows), 3)
    known = annotate(annotate(b.graph(rows), 4), 3)

    assert {n: (v.batch_dim, v.splittable) for n, v in known.values.items()} == {
        n: (v.batch_dim, v.splittable) for n, v in graph.values.items()
    }
    assert not graph.values["square"].splittable
    assert graph.values["square"].batch_dim is None
    assert not graph.values["one_more"].splittable
    assert (graph.values["rows"].batch_dim, graph.values["rows"].splittable) == (0, True)
    assert graph.values["transposed"].batch_dim == 1


def test_inputs_scale_from_the_example(builder):
    """The example may hold any number of samples, and several rows for each."""
    b = builder(x=torch.randn(2, 4), boxes=torch.randn(6, 5), table=torch.randn(2, 2))
    graph = annotate(b.graph(Ref("x"), unbatched=("table",)), 4)

    assert [graph.values[n].shape for n in ("x", "boxes", "table")] == [(4, 4), (12, 5), (2, 2)]


def test_the_layout_of_inputs_and_parameters_is_kept(builder):
    """A view that only works on channels-last memory works."""
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    b = builder(image=image)
    rows = b.method("permute", Ref("image"), 0, 2, 3, 1)
    flat = b.method("view", rows, -1, 3, name="flat")

    assert annotate(b.graph(flat), 6).values["flat"].shape == (96, 3)


def test_ops_of_one_mode_are_described_by_a_run_in_that_mode(builder):
    b = builder(x=torch.randn(3, 4))
    b.add_module("fc", nn.Linear, 4, 4)
    h = b.module("fc", Ref("x"), name="h")
    mask = b.call(torch.rand_like, h, mode=Mode.TRAIN, name="mask")
    masked = b.call(operator.mul, h, mask, mode=Mode.TRAIN, name="masked")
    wide = b.call(torch.cat, [h, h], 1, mode=Mode.EVAL, name="wide")
    same = b.method("view_as", h, h, mode=Mode.EVAL, name="same")
    b.method("sum", wide, mode=Mode.EVAL, name="total")
    out = b.call(torch.relu, ByMode(masked, same), name="out")
    graph = annotate(b.graph(out, b.method("sum", out)), 2)

    assert graph.values["wide"].shape == (2, 8)
    assert graph.values["masked"].requires_grad
    assert graph.values["same"].storage == graph.values["h"].storage
    assert graph.values["mask"].storage != graph.values["h"].storage


def test_a_graph_without_a_loss_runs_in_eval_mode_without_gradients(builder):
    b = builder(x=torch.randn(1, 4))
    b.add_module("bn", nn.BatchNorm1d, 4)
    out = b.module("bn", Ref("x"), name="out")
    graph = annotate(b.graph(out), 1)  # in train mode BatchNorm refuses a single sample

    assert not graph.values["out"].requires_grad


def test_meta_examples_and_parameters_will_do(builder):
    with torch.device("meta"):
        b = builder(tokens=torch.zeros(2, 5, dtype=torch.int64))
        b.add_module("embed", nn.Embedding, 10, 8)
        b.add_module("rnn", nn.LSTM, 8, 6, batch_first=True)
    positions = b.call(torch.arange, 5, device=torch.device("meta"), name="positions")
    h = b.module("embed", Ref("tokens"))
    h = b.call(operator.add, h, b.module("embed", positions))
    b.module("rnn", h, name="rnn", results=2)
    op = b.ops[-1]
    graph = b.graph(Ref("rnn_0"))
    assert op.outputs == ("rnn_0", "rnn_1")

    values = annotate(graph, 3).values
    assert values["rnn_0"].shape == (3, 5, 6)
    assert values["rnn_1"].kind is ValueKind.OTHER


def test_a_batch_that_an_op_cannot_run_is_refused_by_name(builder):
    b = builder(x=torch.randn(2, 4))
    out = b.call(F.batch_norm, Ref("x"), None, None, training=True, name="norm")
    graph = b.graph(out, b.method("sum", out))

    with pytest.raises(ModelError, match="norm fails on 1 samples"):
        annotate(graph, 1)


def test_an_input_without_an_example_is_refused(builder):
    graph = builder(x=torch.randn(2, 4)).graph(Ref("x")).replace(example={})

    with pytest.raises(ModelError, match="no example of the input x"):
        annotate(graph, 1)
