"""Which ops mix samples, compared with what eager PyTorch gives for a batch and for its halves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import ByMode, Ref
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.shapes import annotate

BATCH = 4
Build = Callable[[Any, Any], Any]


def layer(cls: type[nn.Module], *args: object, **options: object) -> Build:
    def build(b: Any, x: Any) -> Any:
        b.add_module("layer", cls, *args, **options)
        return b.module("layer", x, name="layer")

    return build


def functional(function: Callable[..., Any], *args: object, **options: object) -> Build:
    return lambda b, x: b.call(function, x, *args, name="layer", **options)


def by_hand(b: Any, x: Any) -> Any:
    mean = b.call(torch.mean, x, 0, name="layer")
    return b.call(operator.sub, x, mean)


def typed_as(b: Any, x: Any) -> Any:
    table = b.add_state("table", torch.ones(8, dtype=torch.float64), False)
    return b.call(operator.mul, x, b.method("to", table, x, name="layer"))


def new_zeros(b: Any, x: Any) -> Any:
    return b.call(operator.add, x, b.method("new_zeros", x, (8,), name="layer"))


def pairs(b: Any, x: Any) -> Any:
    row = b.method("flatten", x, 1)
    product = b.call(torch.matmul, row, b.method("t", row), name="layer")
    return b.call(torch.matmul, product, row)


CASES: dict[str, tuple[Build, bool]] = {
    "BatchNorm1d": (layer(nn.BatchNorm1d, 6), True),
    "BatchNorm without state": (layer(nn.BatchNorm1d, 6, affine=False), True),
    "BatchNorm, never running": (layer(nn.BatchNorm1d, 6, track_running_stats=False), True),
    "SyncBatchNorm": (layer(nn.SyncBatchNorm, 6), True),
    "functional": (functional(F.batch_norm, None, None, training=ByMode(True, False)), True),
    "InstanceNorm1d": (layer(nn.InstanceNorm1d, 6), False),
    # Its results do not mix samples, but its running statistics are means over the batch.
    "InstanceNorm1d, running": (layer(nn.InstanceNorm1d, 6, track_running_stats=True), True),
    "GroupNorm": (layer(nn.GroupNorm, 2, 6), False),
    "LayerNorm": (layer(nn.LayerNorm, 8), False),
    "Linear": (layer(nn.Linear, 8, 8), False),
    "Dropout": (layer(nn.Dropout, 0.5), False),
    "softmax": (functional(torch.softmax, -1), False),
    "by hand": (by_hand, True),
    "pairs": (pairs, True),
    "typed as": (typed_as, False),
    "new zeros": (new_zeros, False),
}


@pytest.mark.parametrize("label", CASES)
def test_what_mixes_samples(builder, label: str) -> None:
    build, mixes = CASES[label]
    b = builder(x=torch.randn(BATCH, 6, 8))
    y = build(b, Ref("x"))
    graph = annotate(b.graph(y, b.method("sum", y)), BATCH)

    assert mixing_ops(graph) == ({"layer"} if mixes else frozenset())


@pytest.mark.parametrize("training", [True, False])
def test_the_mean_of_the_loss_mixes_nothing(builder, training: bool) -> None:
    """Micro-batches combine their losses by weight; BatchNorm in eval mode does not mix."""
    b = builder(x=torch.randn(BATCH, 6, 8))
    b.add_module("norm", nn.BatchNorm1d, 6)
    y = b.module("norm", Ref("x"), name="norm")
    loss = b.method("mean", y) if training else None

    assert mixing_ops(annotate(b.graph(y, loss), BATCH)) == ({"norm"} if training else set())


def test_the_table_says_what_eager_pytorch_does() -> None:
    """A module of the table mixes when its outputs for halves are not those for the batch."""
    x = torch.randn(BATCH, 6, 8)
    for cls, args, mixes in [
        (nn.BatchNorm1d, (6,), True),
        (nn.InstanceNorm1d, (6,), False),
        (nn.GroupNorm, (2, 6), False),
        (nn.LayerNorm, (8,), False),
    ]:
        module = cls(*args).train()
        halves = torch.cat([module(x[: BATCH // 2]), module(x[BATCH // 2 :])])
        assert torch.allclose(module(x), halves, atol=1e-5) is not mixes
