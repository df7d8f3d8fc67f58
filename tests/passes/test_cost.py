"""Estimated and measured costs, compared with closed formulas and real counts."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import BUILT_IN, Device
from gpipe_compiler.ir import ByMode, Mode, Ref
from gpipe_compiler.passes.cost import OpCost, _name, roofline
from gpipe_compiler.passes.distinct import distinct
from gpipe_compiler.passes.measure import measure
from gpipe_compiler.passes.shapes import annotate

UNIT = Device("unit", flops=1.0, memory_bandwidth=float("inf"), memory=1, launch_s=0.0)
BYTES = Device("bytes", flops=float("inf"), memory_bandwidth=1.0, memory=1, launch_s=0.0)
LAUNCH = Device("launch", float("inf"), float("inf"), memory=1, launch_s=1.0)


def test_convolutions_and_linear_layers_cost_what_their_formulas_say(convnet):
    batch = 3
    costs = roofline(annotate(convnet, batch), UNIT).ops
    first = 2 * batch * 6 * 8 * 8 * 3 * 9
    second = 2 * batch * 6 * 8 * 8 * 6 * 9
    linear = 2 * batch * 6 * 5

    assert (costs["a_conv"].flops, costs["b_conv"].flops) == (first, second)
    # the image needs no gradient, so the first layer's backward is for its weight only
    assert (costs["a_conv"].backward_flops, costs["b_conv"].backward_flops) == (first, 2 * second)
    assert (costs["scores"].flops, costs["scores"].backward_flops) == (linear, 2 * linear)
    assert costs["scores"].forward_s == linear
    assert costs["a_relu"].flops == 0


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_backward_of_a_grouped_convolution_is_as_sparse_as_its_forward(
    builder, groups, transposed
):
    """A multiply-add for every weight at every place, forward and for either gradient."""
    b = builder(x=torch.randn(4, 8, 6, 6).requires_grad_())
    b.add_module("scale", nn.Conv2d, 8, 8, 1, bias=False)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    b.add_module("conv", kind, 8, 16, 3, groups=groups, bias=False)
    h = b.module("conv", b.module("scale", Ref("x")))
    graph = annotate(b.graph(h, b.method("sum", h)), 4)

    cost = roofline(graph, UNIT).ops[h.name]

    places = 6 * 6 if transposed else 4 * 4
    once = 2 * 4 * places * (8 * 16 // groups) * 3 * 3
    assert (cost.flops, cost.backward_flops) == (once, 2 * once)


def test_traffic_is_what_kernels_read_and_write(convnet):
    batch = 3
    costs = roofline(annotate(convnet, batch), BYTES).ops
    image, hidden = batch * 3 * 8 * 8 * 4, batch * 6 * 8 * 8 * 4
    weight, bias = 6 * 3 * 9 * 4, 6 * 4

    assert costs["a_conv"].bytes == image + weight + bias + hidden
    assert costs["a_relu"].bytes == 2 * hidden
    assert costs["a_relu"].backward_bytes == 3 * hidden  # gradient in, result, gradient out
    assert costs["flat"].bytes == 0
    assert costs["flat"].forward_s == 0.0


def test_every_kernel_is_launched_and_views_are_none(builder):
    b = builder(x=torch.randn(2, 4))
    h = b.call(torch.exp, Ref("x"), name="one")
    h = b.method("view", h, -1, name="none")
    h = b.call(lambda t: t.sin().cos().t(), h, name="two")
    costs = roofline(annotate(b.graph(h), 2), LAUNCH).ops

    assert [costs[name].forward_s for name in ("one", "none", "two")] == [1.0, 0.0, 2.0]
    assert all(cost.backward_s == 0 for cost in costs.values())


def test_ops_without_gradients_have_no_backward(builder):
    b = builder(x=torch.randn(2, 4))
    b.add_module("fc", nn.Linear, 4, 4)
    plain = b.call(torch.matmul, Ref("x"), b.method("t", Ref("x")), name="plain")
    trained = b.module("fc", Ref("x"), name="trained")
    cut = b.method("detach", trained)
    b.module("fc", cut, name="weights_only")
    b.module("fc", trained, name="both")
    out = b.call(operator.add, Ref("both"), b.method("sum", plain))
    costs = roofline(annotate(b.graph(out, b.method("sum", out)), 2), UNIT).ops

    assert costs["plain"].backward_s == 0.0
    assert costs["plain"].flops == 2 * 2 * 2 * 4
    assert costs["weights_only"].backward_flops == costs["weights_only"].flops
    assert costs["both"].backward_flops == 2 * costs["both"].flops


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_and_recurrent_layers_are_counted(builder, groups):
    """Keys and values may have one head for several of the queries."""
    n, heads, length, dim = 2, 6, 8, 16
    b = builder(q=torch.randn(n, heads, length, dim), x=torch.randn(n, length, dim))
    scale = b.add_state("scale", torch.ones(dim), trainable=True)
    q = b.call(operator.mul, Ref("q"), scale)
    k = b.call(operator.getitem, q, (slice(None), slice(None, None, groups)))
    grouped = {"enable_gqa": True} if groups > 1 else {}
    b.call(F.scaled_dot_product_attention, q, k, k, name="attention", **grouped)
    b.add_module("rnn", nn.LSTM, dim, 5, batch_first=True)
    b.module("rnn", Ref("x"), name="rnn", results=2)
    loss = b.call(operator.add, b.method("sum", Ref("attention")), b.method("sum", Ref("rnn_0")))
    costs = roofline(annotate(b.graph(Ref("attention"), loss), n), UNIT).ops

    product = 2 * n * heads * length * length * dim
    assert costs["attention"].flops == 2 * product
    assert costs["attention"].backward_flops == 5 * product  # the scores are computed again
    assert costs["rnn"].flops == 2 * n * length * 4 * 5 * (dim + 5)
    assert costs["rnn"].backward_flops == 2 * costs["rnn"].flops


def test_an_embedding_reads_only_its_rows(builder):
    b = builder(tokens=torch.zeros(2, 3, dtype=torch.int64))
    b.add_module("embed", nn.Embedding, 1000, 4)
    h = b.module("embed", Ref("tokens"), name="h")
    cost = roofline(annotate(b.graph(h, b.method("sum", h)), 2), BYTES).ops["h"]

    assert cost.bytes == 2 * 6 * 4 * 4 + 6 * 8
    assert cost.backward_bytes >= 1000 * 4 * 4  # the gradient of the whole table


def test_gradients_of_parameters_cost_their_part_of_the_backward(builder):
    """A linear layer's two products of a backward, and nothing of what has no parameters."""
    batch, wide, narrow = 4, 8, 2
    b = builder(x=torch.randn(batch, wide))
    b.add_module("one", nn.Linear, wide, wide, bias=False)
    b.add_module("two", nn.Linear, wide, narrow, bias=False)
    h = b.module("one", Ref("x"), name="one")
    h = b.call(torch.relu, h, name="relu")
    h = b.module("two", h, name="two")
    frozen = b.call(F.linear, h, b.add_state("w", torch.randn(3, narrow)), name="frozen")
    weights = b.call(
        F.linear, b.method("detach", h), b.add_state("p", torch.randn(3, narrow), True)
    )
    out = b.call(operator.add, frozen, weights)
    graph = annotate(b.graph(out, b.method("sum", out)), batch)
    costs = roofline(graph, UNIT).ops
    product = 2 * batch * wide * narrow

    assert costs["one"].weight_s == costs["one"].backward_s == 2 * batch * wide * wide
    assert (costs["two"].weight_s, costs["two"].backward_s) == (product, 2 * product)
    assert costs["relu"].weight_s == costs["frozen"].weight_s == 0.0
    assert costs["frozen"].backward_s == 2 * batch * 3 * narrow
    alone = costs[weights.name]
    assert alone.weight_s == alone.backward_s == 2 * batch * 3 * narrow


def test_in_place_ops_have_a_backward_of_their_own(builder):
    b = builder(x=torch.randn(2, 4))
    b.add_module("fc", nn.Linear, 4, 4)
    h = b.module("fc", Ref("x"))
    h = b.call(torch.relu_, h, name="relu")
    costs = roofline(annotate(b.graph(h, b.method("sum", h)), 2), BYTES).ops

    assert costs["relu"].backward_bytes == 3 * 2 * 4 * 4


def test_equal_ops_are_told_apart_by_what_matters(builder):
    b = builder(x=torch.randn(2, 4), y=torch.randn(2, 4))
    b.add_module("one", nn.Linear, 4, 4)
    b.add_module("two", nn.Linear, 4, 4)
    b.add_module("bare", nn.Linear, 4, 4, bias=False)
    b.call(torch.relu, Ref("x"), name="relu")
    b.call(torch.relu, Ref("y"), name="relu_same")
    h = b.module("one", Ref("x"), name="one")
    b.call(torch.relu, h, name="relu_with_gradient")
    b.module("two", Ref("y"), name="two")
    b.module("bare", Ref("y"), name="bare")
    b.call(operator.mul, Ref("x"), Ref("y"), name="product")
    b.call(operator.mul, Ref("x"), Ref("x"), name="square")
    b.call(operator.mul, Ref("x"), 2, name="twice")
    b.call(operator.mul, Ref("x"), 2.0, name="twice_float")
    b.call(torch.add, Ref("x"), Ref("y"), alpha=ByMode(1, 2), name="mode")
    b.call(torch.add, Ref("y"), Ref("x"), alpha=ByMode(1, 2), name="same_mode")
    b.call(torch.exp, Ref("x"), mode=Mode.EVAL, name="never")
    graph = annotate(b.graph(h, b.method("sum", h)), 2)
    groups = {frozenset(n) for _, n in distinct(graph)}

    assert frozenset({"relu", "relu_same"}) in groups
    assert frozenset({"one", "two"}) in groups
    assert frozenset({"mode", "same_mode"}) in groups
    alone = {"relu_with_gradient", "bare", "product", "square", "twice", "twice_float"}
    assert {frozenset({name}) for name in alone} <= groups
    assert not any("never" in group for group in groups)
    assert roofline(graph, UNIT).ops["never"] == OpCost()


def test_the_source_is_said(convnet):
    costs = roofline(annotate(convnet, 2), BUILT_IN["a100"].device)

    assert costs.source == "roofline on A100"
    assert costs.batch_size == 2


class Work:
    """A clock that only work sets forward: what else runs on this machine does not count."""

    def __init__(self):
        self.now = 0.0

    def seconds(self):
        self.now += 1e-6
        return self.now


def test_measured_times_are_those_of_the_op(builder, monkeypatch):
    """A function that takes a known time, forward and backward, is measured to take it."""
    clock = Work()
    monkeypatch.setattr("gpipe_compiler.cluster.local.clock_of", lambda device: clock.seconds)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if type(x) is torch.Tensor:
                clock.now += 0.004
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            if type(gradient) is torch.Tensor:
                clock.now += 0.008
            return gradient * 1

    def slow(x):
        return Slow.apply(x)

    b = builder(x=torch.randn(2, 4))
    b.add_module("fc", nn.Linear, 4, 4)
    h = b.module("fc", Ref("x"), name="fc")
    h = b.call(slow, h, name="slow")
    b.method("view", h, -1, name="view")
    costs = measure(annotate(b.graph(h, b.method("sum", h)), 2), UNIT, torch.device("cpu"))

    assert costs.ops["slow"].forward_s == pytest.approx(0.004, rel=0.01)
    assert costs.ops["slow"].backward_s == pytest.approx(0.008, rel=0.01)
    assert costs.ops["fc"].flops == 2 * 2 * 4 * 4
    assert not costs.estimated
    assert costs.source.startswith("measured on cpu")


def test_a_whole_network_is_measured(convnet):
    before = torch.random.get_rng_state()
    graph = annotate(convnet, 2)
    costs = measure(graph, UNIT, torch.device("cpu"))

    assert not costs.estimated
    assert all(costs.ops[op.name].forward_s > 0 for op in graph.ops)
    assert costs.ops["a_conv"].backward_s > 0
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(convnet.tensors["bn.running_mean"], torch.zeros(6))


def test_indices_stay_in_range_and_meta_weights_are_made_real(builder):
    with torch.device("meta"):
        b = builder(tokens=torch.zeros(2, 3, dtype=torch.int64), target=torch.zeros(2).long())
        b.add_module("embed", nn.Embedding, 50, 8)
        b.add_module("rnn", nn.LSTM, 8, 4, batch_first=True)
    h = b.module("embed", Ref("tokens"), name="module")
    h2 = b.call(F.embedding, Ref("tokens"), b.add_state("w", torch.randn(7, 8)), name="function")
    h = b.module("rnn", b.call(operator.add, h, h2), results=2, name="rnn")[0]
    h = b.method("mean", h, 1)
    b.call(F.cross_entropy, h, Ref("target"), name="loss")
    costs = measure(annotate(b.graph(h, Ref("loss")), 2), UNIT, torch.device("cpu"))

    assert not costs.estimated
    assert costs.ops["rnn"].backward_s > 0


def test_an_op_that_cannot_run_alone_is_estimated_and_named(builder):
    b = builder(x=torch.randn(2, 4), row=torch.zeros(2, dtype=torch.int64))
    one = b.method("narrow", Ref("x"), 1, 0, 1)
    index = b.method("unsqueeze", Ref("row"), 1)
    picked = b.call(torch.gather, one, 1, index, name="picked")
    b.call(torch.gather, one, 1, index, name="again")
    graph = annotate(b.graph(picked), 64)
    costs = measure(graph, LAUNCH, torch.device("cpu"))

    assert costs.estimated == {"picked", "again"}
    assert costs.ops["picked"].forward_s == 1.0


def test_products_of_another_type_have_the_name_of_products() -> None:
    a, b = torch.ones(32, 48), torch.ones(48, 64)
    assert _name(torch.ops.aten.mm.default, (a, b)) == "mm"
    assert _name(torch.ops.aten.mm.default, (a[:2], b)) == "mm, few rows"
    assert _name(torch.ops.aten.mm.dtype, (a, b, torch.float32)) == "mm"
