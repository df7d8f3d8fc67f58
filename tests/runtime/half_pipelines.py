"""A pipeline whose boundary values change type under autocast, and the plain loop beside it."""

from __future__ import annotations

import contextlib

import torch
from tiny_pipelines import SAMPLES, WIDTH, cross, plain, spec_of, states
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import Input, Leaf, LossSpec, LossTerm, Reduction, StageSpec

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Half0(nn.Module):
    """Makes a 16-bit value that all later stages use, and an fp32 sum with the input."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a = self.l0(x)
        return a, x + a


class Half1(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, a, r):
        h = self.down(F.gelu(self.up(self.norm(r))))
        return F.dropout(h, 0.2, self.training), r + h * a


class Half2(nn.Module):
    """Casts an fp32 value it receives twice."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, h, r1):
        return r1 + self.key(r1) * self.query(r1) + a * h


class Half3(nn.Module):
    """Uses a weight twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, r2):
        return self.out(F.relu(self.out(self.norm(r2)))) + a

    def loss(self, y, target):
        return F.mse_loss(y, target)


def half_spec(**more):
    """Its crossings are planned for fp32."""
    names = [
        (Half0, ("x",), ("a", "r")),
        (Half1, ("a", "r"), ("h", "r1")),
        (Half2, ("a", "h", "r1"), ("r2",)),
        (Half3, ("a", "r2"), ("y",)),
    ]
    stages = [
        StageSpec(
            module,
            inputs,
            outputs,
            states(module, f"{module.__name__.lower()}."),
            loss_inputs=("y", "target") if module is Half3 else (),
            random_ops=(0,) if module is Half1 else (),
        )
        for module, inputs, outputs in names
    ]
    crossings = [
        cross("a", 0, (1, 2, 3)),
        cross("r", 0, (1,)),
        cross("target", 0, (3,), gradient=False),
        cross("h", 1, (2,)),
        cross("r1", 1, (2,)),
        cross("r2", 2, (3,)),
    ]
    inputs = [
        Input("x", ("args", 0), shape=(SAMPLES, WIDTH), dtype=torch.float32),
        Input("target", ("target",), shape=(SAMPLES, WIDTH), dtype=torch.float32),
    ]
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
    return spec_of(stages, crossings, inputs, {"y": Leaf("y"), "a": Leaf("a")}, loss, **more)


class Picks(nn.Module):
    """Needs numbers to know a shape; makes an fp32 value and one that autocast makes 16-bit."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x[x > x.max()].sum() + x, self.l0(x)


class Adds(nn.Module):
    def forward(self, h, a):
        return h * 2 + a


def picking_spec(**more):
    stages = [
        StageSpec(Picks, ("x",), ("h", "a"), states(Picks)),
        StageSpec(Adds, ("h", "a"), ("y",)),
    ]
    crossings = [cross("h", 0, (1,)), cross("a", 0, (1,))]
    source = Input("x", ("args", 0), shape=(SAMPLES, WIDTH), dtype=torch.float32)
    return spec_of(stages, crossings, [source], Leaf("y"), None, **more)


def half_data(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, samples, WIDTH, generator=generator)
    return x, target


class PlainLoop:
    """The stages of a spec as one plain model, with tied parameters as one, and its training loop.

    Args:
        state: the tensors that the model begins with, by name.
    """

    def __init__(self, spec, state, precision="fp32"):
        self.spec = spec
        self.dtype = DTYPES[precision]
        self.step_number = 0
        self.modules = []
        self.parameters = {}
        for stage in spec.stages:
            module = stage.module()
            for own, tensor in module.state_dict().items():
                tensor.copy_(state[stage.state[own]])
            for own, parameter in list(module.named_parameters()):
                first = self.parameters.setdefault(stage.state[own], parameter)
                path, _, last = own.rpartition(".")
                module.get_submodule(path)._parameters[last] = first
            self.modules.append(module)

    def autocast(self):
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", self.dtype)

    def train(self, mode=True):
        for module in self.modules:
            module.train(mode)

    def forward(self, values):
        with self.autocast():
            return plain(self.spec, self.modules, values)

    def step(self, parts, scale=lambda loss: loss, *, backwards=False):
        """Loss and gradients of a mini-batch in these micro-batches, each of the same size.

        Args:
            backwards: the gradients of the last micro-batch come first, as with GPipe's schedule.
        """
        total = 0.0
        for number, values in sorted(enumerate(parts), reverse=backwards):
            with SeededRandom(0, self.step_number, number, range(100)):
                loss = self.forward(values)["loss"] / len(parts)
            scale(loss).backward()
            total = total + loss.detach()
        self.step_number += 1
        return total

    def gradients(self):
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def weights(self):
        return {name: p.detach().clone() for name, p in self.parameters.items()}


def parts_of(data, microbatches, names=("x", "target")):
    """The inputs of each micro-batch by name."""
    pieces = [tensor.chunk(microbatches) for tensor in data]
    return [dict(zip(names, part, strict=True)) for part in zip(*pieces, strict=True)]
