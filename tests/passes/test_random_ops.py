"""Counts of random aten ops, compared with those of a real run."""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.ir import ByMode, Ref
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.runtime.core.random import draws


class Drawing(DispatchWatch):
    """Counts the aten ops inside it that draw."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def saw(self, func, args, kwargs, returned):
        self.count += bool(draws(func, args, kwargs))


def network(builder):
    b = builder(x=torch.randn(2, 5, 8))
    b.add_module("drop", nn.Dropout, 0.3)
    b.add_module("none", nn.Dropout, 0.0)
    b.add_module("attention", nn.MultiheadAttention, 8, 2, dropout=0.1, batch_first=True)
    b.add_module("rnn", nn.LSTM, 8, 8, num_layers=3, dropout=0.2, batch_first=True)
    h = b.module("drop", Ref("x"), name="drop")
    h = b.module("none", h, name="none")
    h = b.module("attention", h, h, h, results=2, name="attention")[0]
    h = b.call(F.scaled_dot_product_attention, h, h, h, dropout_p=ByMode(0.1, 0.0), name="sdpa")
    h = b.module("rnn", h, results=2, name="rnn")[0]
    h = b.call(F.dropout, h, 0.5, training=ByMode(True, False), name="functional")
    noise = b.call(torch.rand_like, h, name="noise")
    h = b.call(operator.mul, h, noise, name="product")
    return b.graph(h, b.method("sum", h))


def test_counts_are_those_of_a_real_training_forward(builder, eager):
    graph = annotate(network(builder), 2)
    real = {}

    def observer(op, execute):
        with Drawing() as watch:
            returned = execute()
        if watch.count:
            real[op.name] = watch.count
        return returned

    run = eager(graph, 2)
    run.interpreter.prepare()  # initialising a module is random too
    run.run(observer)

    assert random_ops(graph) == real
    assert real["rnn"] == 2
    assert "none" not in real
    assert "product" not in real


def test_inference_is_random_only_where_the_model_insists(builder):
    assert random_ops(network(builder).replace(loss=None)) == {"noise": 1}
