"""A hand-written pipeline of two stages with every kind of BatchNorm, and its plain model."""

from __future__ import annotations

import torch
from tiny_pipelines import cross, spec_of
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.spec import Input, Leaf, LossSpec, LossTerm, Reduction, StageSpec

F64 = torch.float64
STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Net(nn.Module):
    """The plain model: every kind of BatchNorm, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2, dtype=F64)
        self.n2 = nn.BatchNorm2d(3, dtype=F64)
        self.n3 = nn.BatchNorm3d(3, momentum=0.4, affine=False, dtype=F64)
        self.n1 = nn.BatchNorm1d(3, momentum=0.3, dtype=F64)
        self.n0 = nn.BatchNorm1d(3, momentum=None, dtype=F64)
        self.out = nn.Linear(3, 3, dtype=F64)

    def forward(self, x):
        h = self.n3(torch.relu(self.n2(self.conv(x)))[:, :, None]).mean((2, 3, 4))
        h = F.dropout(torch.tanh(self.n1(h)), 0.2, self.training)
        return self.out(self.n0(self.n1(h)))


class Front(nn.Module):
    """BatchNorm modules, and the counter of a layer whose statistics are in the next stage."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2, dtype=F64)
        self.n2 = nn.BatchNorm2d(3, dtype=F64)
        self.n3 = nn.BatchNorm3d(3, momentum=0.4, affine=False, dtype=F64)
        self.register_buffer("n1_num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.n3(torch.relu(self.n2(self.conv(x)))[:, :, None]).mean((2, 3, 4))
        if self.training:
            self.n1_num_batches_tracked.add_(1)
            self.n1_num_batches_tracked.add_(1)
        return h


class Back(nn.Module):
    """One layer written out, as where a whole model is traced, by both of torch's functions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n1_running_mean", torch.zeros(3, dtype=F64))
        self.register_buffer("n1_running_var", torch.ones(3, dtype=F64))
        self.n1_weight = nn.Parameter(torch.ones(3, dtype=F64))
        self.n1_bias = nn.Parameter(torch.zeros(3, dtype=F64))
        self.n0 = nn.BatchNorm1d(3, momentum=None, dtype=F64)
        self.out = nn.Linear(3, 3, dtype=F64)

    def forward(self, h):
        running = self.n1_running_mean, self.n1_running_var
        affine = self.n1_weight, self.n1_bias
        h = F.batch_norm(h, *running, *affine, self.training, momentum=0.3)
        h = F.dropout(torch.tanh(h), 0.2, self.training)
        h = torch.batch_norm(h, *affine, *running, self.training, 0.3, 1e-5, False)
        return self.out(self.n0(h))

    def loss(self, y, target):
        return F.mse_loss(y, target)


def names_of(module):
    found = {}
    for own in module().state_dict():
        found[own] = own.replace("n1_", "n1.")
    return found


def net_spec(**more):
    stages = [
        StageSpec(
            Front,
            ("x",),
            ("h",),
            names_of(Front),
            writes=(
                *(f"{n}.{s}" for n in ("n2", "n3") for s in STATE[2:]),
                "n1_num_batches_tracked",
            ),
            mixes=True,
        ),
        StageSpec(
            Back,
            ("h",),
            ("y",),
            names_of(Back),
            ("y", "target"),
            random_ops=(0,),
            writes=("n1_running_mean", "n1_running_var", *(f"n0.{s}" for s in STATE[2:])),
            mixes=True,
        ),
    ]
    crossings = [
        cross("h", 0, (1,), dtype=F64, shape=(2, 3)),
        cross("target", 0, (1,), gradient=False, dtype=F64, shape=(2, 3)),
    ]
    inputs = [Input("x", ("args", 0)), Input("target", ("target",))]
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
    return spec_of(stages, crossings, inputs, Leaf("y"), loss, **more)


def data(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 2, 4, 4, generator=generator, dtype=F64) * 3 + 5
    return x, torch.randn(samples, 3, generator=generator, dtype=F64)
