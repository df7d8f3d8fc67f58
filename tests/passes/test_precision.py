"""Analyses under autocast, compared with an eager run under it and against sums done by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import Device
from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Ref
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.measure import measure
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.runtime.spec import Precision

BATCH = 4
LOWER = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def network(builder):
    b = builder(x=torch.randn(BATCH, 8))
    b.add_module("first", nn.Linear, 8, 16)
    b.add_module("norm", nn.LayerNorm, 16)
    b.add_module("second", nn.Linear, 16, 16)
    h = b.module("first", Ref("x"), name="first")
    n = b.module("norm", h, name="norm")
    h = b.call(torch.add, h, n, name="sum")
    h = b.module("second", h, name="second")
    b.call(F.softmax, h, -1, name="softmax")
    y = b.call(torch.cumsum, h, -1, name="cumsum")
    return b.graph(y, b.method("mean", y))


@pytest.mark.parametrize("precision", [*LOWER, Precision.FP32])
def test_types_are_those_of_an_eager_run(builder, eager, precision: Precision) -> None:
    graph = network(builder)
    with torch.autocast("cpu", LOWER.get(precision), enabled=precision in LOWER):
        real = eager(graph, BATCH).run()

    annotated = annotate(graph, BATCH, precision)

    found = {name: value.dtype for name, value in annotated.values.items()}
    assert found == {name: tensor.dtype for name, tensor in real.items()}
    assert annotated.precision is precision
    assert len(set(found.values())) == (2 if precision in LOWER else 1)


def test_what_does_not_run_under_autocast_is_refused_for_that(builder):
    b = builder(x=torch.randn(BATCH, 8))
    b.add_module("first", nn.Linear, 8, 4)
    start = b.call(torch.zeros, 2, 4, name="start")
    index = b.call(torch.zeros, 2, 4, dtype=torch.long, name="index")
    h = b.call(torch.scatter_add, start, 0, index, b.module("first", Ref("x"), name="first"))
    graph = b.graph(h)
    annotate(graph, BATCH, Precision.FP32)
    with pytest.raises(ModelError, match=r"scatter_add\S* fails in bf16") as caught:
        annotate(graph, BATCH, Precision.BF16)
    assert "enabled=False" in str(caught.value)


def chain(builder):
    b = builder(x=torch.randn(BATCH, 8))
    b.add_module("first", nn.Linear, 8, 16, bias=False)
    b.add_module("second", nn.Linear, 16, 4, bias=False)
    h = b.module("second", b.module("first", Ref("x"), name="first"), name="second")
    return b.graph(h, b.method("sum", h))


def test_casts_of_weights_are_no_activations(builder) -> None:
    """Autograd keeps the 16-bit inputs of both products, and the weights, which are shared."""
    kept = saved_tensors(annotate(chain(builder), BATCH, Precision.BF16))

    assert kept.saved_bytes(["first"]) == 2 * BATCH * 8
    assert kept.saved_bytes(["second"]) == 2 * BATCH * 16
    plain = saved_tensors(annotate(chain(builder), BATCH))
    assert plain.saved_bytes(["second"]) == 4 * BATCH * 16


def test_products_of_16_bits_run_at_their_speed(builder) -> None:
    """A device without limits of bandwidth, four times as fast in 16 bits."""
    slow = Device("unit", flops=1.0, memory_bandwidth=float("inf"), memory=1, launch_s=0.0)
    fast = dataclasses.replace(slow, half_flops=4.0)
    flops = 2 * BATCH * 8 * 16
    times = {
        (device.half_flops, precision): roofline(annotate(chain(builder), BATCH, precision), device)
        .ops["first"]
        .forward_s
        for device in (slow, fast)
        for precision in (Precision.FP32, Precision.BF16)
    }

    assert times == {
        (None, Precision.FP32): flops,
        (None, Precision.BF16): flops,
        (4.0, Precision.FP32): flops,
        (4.0, Precision.BF16): flops / 4,
    }


def test_other_analyses_run_in_the_same_precision(builder) -> None:
    host = Device("host", flops=1e9, memory_bandwidth=1e9, memory=1, launch_s=0.0)
    graph = annotate(network(builder), BATCH, Precision.BF16)

    costs = measure(graph, host, torch.device("cpu"), budget_s=0.001)

    assert not costs.estimated
    assert any(cost.forward_s > 0 for cost in costs.ops.values())
    assert mixing_ops(graph) == frozenset()
