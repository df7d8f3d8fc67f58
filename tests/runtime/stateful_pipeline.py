"""A hand-written pipeline of everything that a second forward can get wrong.

Four stages in float64: one with nothing to train; one whose output depends on a running average
that autograd keeps for the backward, with dropout; one with BatchNorm and frozen parts; and one
tied to the second, with a separate loss that draws random numbers too.
"""

from __future__ import annotations

import torch
from tiny_pipelines import WIDTH, cross, spec_of, states
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.spec import Input, Leaf, LossSpec, LossTerm, Reduction, StageSpec

F64 = torch.float64
NORM = ("running_mean", "running_var", "num_batches_tracked")


class Fixed(nn.Module):
    """Nothing to train, and an input that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH, dtype=F64).requires_grad_(False)

    def forward(self, x):
        a = torch.tanh(self.l0(x))
        return a, a.argmax(1)


class Averaged(nn.Module):
    """Scales by a running average after it has taken in the micro-batch."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.eye(WIDTH, dtype=F64) / 2)
        self.register_buffer("average", torch.ones(WIDTH, dtype=F64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, a, top):
        h = a @ self.shared
        if self.training:
            self.steps.add_(1)
            self.average.mul_(0.8).add_(h.detach().mean(0), alpha=0.2)
        h = h * self.average
        return F.dropout(h, 0.3, self.training).scatter(1, top[:, None], 1.0)


class Normed(nn.Module):
    """BatchNorm with a cumulative average, and a frozen bias."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH, momentum=None, dtype=F64)
        self.l2 = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.l2.bias.requires_grad_(False)
        self.drop = nn.Dropout(0.2)

    def forward(self, h):
        return self.drop(self.l2(self.bn(h)))


class Head(nn.Module):
    """Reads the skip from `Averaged`; the loss draws too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.eye(WIDTH, dtype=F64) / 2)

    def forward(self, h, g):
        return F.linear(g, self.head) + h

    def loss(self, y, target):
        return F.mse_loss(F.dropout(y, 0.1, self.training), target)


def stateful_spec(**more):
    stages = [
        StageSpec(Fixed, ("x",), ("a", "top"), states(Fixed)),
        StageSpec(
            Averaged,
            ("a", "top"),
            ("h",),
            states(Averaged) | {"shared": "w"},
            random_ops=(0,),
            writes=("average", "steps"),
        ),
        StageSpec(
            Normed,
            ("h",),
            ("g",),
            states(Normed),
            random_ops=(1,),
            writes=tuple(f"bn.{name}" for name in NORM),
            mixes=True,
        ),
        StageSpec(Head, ("h", "g"), ("y",), {"head": "w"}, ("y", "target"), random_ops=(2,)),
    ]
    crossings = [
        cross("a", 0, (1,), gradient=False, dtype=F64),
        cross("top", 0, (1,), gradient=False, dtype=torch.int64, shape=(2,)),
        cross("h", 1, (2, 3), dtype=F64),
        cross("g", 2, (3,), dtype=F64),
        cross("target", 0, (3,), gradient=False, dtype=F64),
    ]
    inputs = [Input("x", ("args", 0)), Input("target", ("target",))]
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
    return spec_of(stages, crossings, inputs, {"y": Leaf("y"), "h": Leaf("h")}, loss, **more)


def stateful_data(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(samples, WIDTH, generator=generator, dtype=F64) for _ in range(2))
