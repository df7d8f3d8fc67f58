"""Tiny pipelines in double precision for tests of replicas, and the plain loop they are held to."""

from __future__ import annotations

import dataclasses

import torch
from tiny_pipelines import (
    SAMPLES,
    WIDTH,
    Skip1,
    X,
    cross,
    data_for,
    norm_spec,
    skip_spec,
    spec_of,
    states,
    tied_spec,
)
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import Input, Leaf, LossSpec, LossTerm, Reduction, StageSpec

RATE = 0.002


class FrozenSkip1(Skip1):
    """A stage that trains nothing."""

    def __init__(self):
        super().__init__()
        self.l1.requires_grad_(False)


class Moody0(nn.Module):
    """Uses a layer only where the data says so; another one never."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = F.dropout(torch.tanh(self.l0(x)), 0.3, self.training)
        return h + self.seldom(x) if (x > 5).any() else h


class Uncounted0(Moody0):
    """Uses the layer always: what blocks are gathered for depends on no data."""

    def forward(self, x):
        return F.dropout(torch.tanh(self.l0(x)), 0.3, self.training) + self.seldom(x)


class Moody1(nn.Module):
    """Its loss is a mean over the targets that are not negative; none of them is 0 / 0."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return self.l1(h)

    def loss(self, y, labels):
        return F.cross_entropy(y, labels, ignore_index=-1)


class Count(nn.Module):
    def forward(self, labels):
        return (labels != -1).sum()


def moody_spec():
    stages = [
        StageSpec(Moody0, ("x",), ("h",), states(Moody0), random_ops=(0,)),
        StageSpec(Moody1, ("h",), ("y",), states(Moody1), ("y", "labels")),
    ]
    weight = StageSpec(Count, ("labels",), ("n",))
    crossings = [
        cross("h", 0, (1,)),
        cross("labels", 0, (1,), gradient=False, dtype=torch.int64, shape=(SAMPLES,)),
    ]
    inputs = [X, Input("labels", ("target",))]
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN, counted=True),), separate=True, weight=weight)
    return spec_of(stages, crossings, inputs, Leaf("y"), loss)


def uncounted_spec():
    spec = moody_spec()
    first = dataclasses.replace(spec.stages[0], module=Uncounted0)
    return dataclasses.replace(spec, stages=(first, *spec.stages[1:]))


def frozen_spec():
    spec = skip_spec()
    stages = [
        dataclasses.replace(stage, module=FrozenSkip1) if stage.module is Skip1 else stage
        for stage in spec.stages
    ]
    return dataclasses.replace(spec, stages=tuple(stages))


def batchnorm_spec():
    spec = norm_spec()
    stages = [
        dataclasses.replace(
            stage, writes=tuple(n for n in stage.state if "running" in n or "num" in n), mixes=True
        )
        for stage in spec.stages
    ]
    return dataclasses.replace(spec, stages=tuple(stages))


def moody_data(samples, seed):
    """Only the first sample is large; the targets of the last third do not count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, WIDTH, generator=generator).clamp(-4, 4)
    x[0, 0] = 6.0
    labels = torch.randint(WIDTH, (samples,), generator=generator)
    labels[samples - samples // 3 :] = -1
    return x, labels, {"x": x, "labels": labels}


SPECS = {
    "skip": skip_spec,
    "tied": tied_spec,
    "norm": batchnorm_spec,
    "frozen": frozen_spec,
    "moody": moody_spec,
    "uncounted": uncounted_spec,
}


def spec_for(name):
    """With all floating values in double precision."""
    spec = SPECS[name]()
    crossings = [
        dataclasses.replace(c, dtype=torch.float64) if c.dtype.is_floating_point else c
        for c in spec.crossings
    ]
    return dataclasses.replace(spec, crossings=tuple(crossings))


def batch_for(name, samples, seed):
    """Inputs, target, and the same by value name."""
    if name in ("moody", "uncounted"):
        return moody_data(samples, seed)
    return data_for("skip" if name == "frozen" else name, samples, seed)


class Plain:
    """The model without a pipeline: every tensor once, by name, and torch's own autograd."""

    def __init__(self, spec, state, seed=0):
        self.spec = spec
        self.seed = seed
        self.steps = 0
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.modules = [stage.module() for stage in spec.stages]
        for module, stage in zip(self.modules, spec.stages, strict=True):
            for own, parameter in module.named_parameters():
                self.state[stage.state[own]].requires_grad_(parameter.requires_grad)

    def loss(self, values, microbatch):
        values = dict(values)
        with SeededRandom(self.seed, self.steps, microbatch, range(100)):
            for module, stage in zip(self.modules, self.spec.stages, strict=True):
                own = {own: self.state[name] for own, name in stage.state.items()}
                found = functional_call(module, own, tuple(values[n] for n in stage.inputs))
                outputs = (found,) if len(stage.outputs) == 1 else found
                values.update(zip(stage.outputs, outputs, strict=True))
            names = self.spec.stages[-1].loss_inputs
            bound = {f"inner.{own}": x for own, x in own.items()}
            wrapped = _Loss(self.modules[-1])
            return functional_call(wrapped, bound, tuple(values[n] for n in names))

    def step(self, values, microbatches, weight=1.0):
        """Adds to the gradients, micro-batch by micro-batch; the loss of the whole."""
        total = 0.0
        for loss, share in self.losses(values, microbatches):
            (loss * share * weight).backward()
            total = total + loss.detach() * share
        self.steps += 1
        return total

    def evaluate(self, values, microbatches):
        """The loss of the whole, in evaluation mode."""
        for module in self.modules:
            module.eval()
        with torch.no_grad():
            return sum(loss * share for loss, share in self.losses(values, microbatches))

    def losses(self, values, microbatches):
        """Those of the micro-batches in which something counts, with their shares."""
        samples = len(next(iter(values.values())))
        split = {name: torch.tensor_split(x, microbatches) for name, x in values.items()}
        for number in range(microbatches):
            part = {name: pieces[number] for name, pieces in split.items()}
            share = self.share(part, values, samples)
            if share:
                yield self.loss(part, number), share

    def share(self, part, values, samples):
        if self.spec.loss.terms[0].reduction is Reduction.SUM:
            return 1.0
        if self.spec.loss.weight is not None:
            return float((part["labels"] != -1).sum() / (values["labels"] != -1).sum())
        return len(next(iter(part.values()))) / samples

    def update(self):
        """Plain SGD; the gradients before it."""
        gradients = {}
        for name, tensor in self.state.items():
            if tensor.requires_grad:
                gradients[name] = tensor.grad
                if tensor.grad is not None:
                    tensor.data.sub_(RATE * tensor.grad)
                    tensor.grad = None
        return gradients


class _Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments):
        return self.inner.loss(*arguments)
