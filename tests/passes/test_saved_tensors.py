"""Saved bytes, compared with real saved-tensor hooks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.ir import Ref
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.passes.shapes import annotate


def really_saved(run, chosen):
    """Bytes of distinct storages, no state among them, that real autograd saves in some ops."""
    own = {tensor.untyped_storage().data_ptr() for tensor in run.states.values()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    def observer(op, execute):
        if op.name not in chosen:
            return execute()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return execute()

    run.run(observer)
    return sum(storage.nbytes() for storage in kept.values())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_set_of_ops_saves_what_it_really_saves(data, random_graphs, eager):
    graph = annotate(data.draw(random_graphs()), 6)
    names = [op.name for op in graph.ops]
    chosen = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    table = saved_tensors(graph)

    assert table.saved_bytes(chosen) == really_saved(eager(graph, 6), chosen)
    assert table.saved_bytes(names) == really_saved(eager(graph, 6), set(names))


def test_a_convolutional_network_saves_what_it_really_saves(convnet, eager):
    graph = annotate(convnet, 4)
    names = [op.name for op in graph.ops]
    table = saved_tensors(graph)

    assert table.saved_bytes(names) == really_saved(eager(graph, 4), set(names))
    # the result of the first ReLU: kept by itself, and by the convolution that follows
    shared = table.by_op["a_relu"] & table.by_op["b_conv"]
    assert [table.bytes[number] for number in shared] == [4 * 6 * 8 * 8 * 4]


def test_attention_and_recurrence_save_what_they_really_save(builder, eager):
    b = builder(x=torch.randn(2, 5, 8))
    b.add_module("attention", nn.MultiheadAttention, 8, 2, batch_first=True)
    b.add_module("rnn", nn.GRU, 8, 8, batch_first=True)
    b.add_module("norm", nn.LayerNorm, 8)
    h = b.module("attention", Ref("x"), Ref("x"), Ref("x"), results=2)[0]
    h = b.module("norm", h)
    h = b.module("rnn", h, results=2)[0]
    graph = annotate(b.graph(h, b.method("sum", h)), 2)
    names = {op.name for op in graph.ops}

    assert saved_tensors(graph).saved_bytes(names) == really_saved(eager(graph, 2), names)


def test_inference_saves_nothing(convnet):
    graph = annotate(convnet.replace(loss=None), 2)

    assert saved_tensors(graph).saved_bytes(op.name for op in graph.ops) == 0


class Kernels(DispatchWatch):
    """The names of the kernels that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def saw(self, func, args, kwargs, returned):
        self.names.append(func.overloadpacket.__name__)


@pytest.mark.parametrize(
    ("kernel", "layer", "options"),
    [
        ("addmm", nn.Linear, (8, 8)),
        ("convolution", nn.Conv1d, (5, 5, 3)),
        ("native_layer_norm", nn.LayerNorm, (8,)),
        ("leaky_relu", nn.LeakyReLU, ()),
        ("gelu", nn.GELU, ()),
        ("sigmoid", nn.Sigmoid, ()),
        ("_softmax", nn.Softmax, (-1,)),
    ],
)
def test_early_is_the_op_that_a_checkpoint_leaves_out_at_its_end(kernel, layer, options, builder):
    """Whether `torch.utils.checkpoint` runs the kernel of the last op again in its backward."""
    b = builder(x=torch.randn(2, 5, 8))
    b.add_module("first", nn.Linear, 8, 8)
    b.add_module("last", layer, *options)
    h = b.module("last", b.method("tanh", b.module("first", Ref("x"))), name="end")
    graph = annotate(b.graph(h, b.method("sum", h)), 2)
    last, x = layer(*options), torch.randn(2, 5, 8, requires_grad=True)
    y = checkpoint(lambda x: last(x.tanh()), x, use_reentrant=False)
    with Kernels() as again:
        y.sum().backward()

    assert ("end" in saved_tensors(graph).early) is (kernel not in again.names)
