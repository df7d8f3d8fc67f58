"""Tiny pipelines written by hand, each with the plain model it is a pipeline of.

Stages hold their layers under the model's names with dots replaced; a plain model is a function of
named tensors, so that nothing of the runtime stands between it and autograd.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import (
    Crossing,
    Input,
    Leaf,
    LossSpec,
    LossTerm,
    PipelineSpec,
    Reduction,
    ScheduleKind,
    StageSpec,
)

WIDTH = 6
SAMPLES = 2
"""In a micro-batch."""


def cross(value, source, targets, *, gradient=True, dtype=torch.float32, shape=None, batch_dim=0):
    sizes = (SAMPLES, WIDTH) if shape is None else shape
    return Crossing(value, source, targets, sizes, dtype, batch_dim, gradient)


def states(module, prefix=""):
    """Own names to the model's: the model knows every tensor as `model.<own>`."""
    with torch.device("meta"):
        built = module()
    names = [name for name, _ in (*built.named_parameters(), *built.named_buffers())]
    return {name: f"model.{prefix}{name}" for name in names}


def spec_of(stages, crossings, inputs, outputs, loss, *, microbatches=4, **more):
    return PipelineSpec(
        name="tiny",
        stages=tuple(stages),
        inputs=tuple(inputs),
        crossings=tuple(crossings),
        outputs=outputs,
        loss=loss,
        schedule=more.pop("schedule", ScheduleKind.GPIPE),
        microbatches=microbatches,
        microbatch_size=SAMPLES,
        **more,
    )


X = Input("x", ("args", 0))
TARGET = Input("target", ("target",))
MSE = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)


class Skip0(nn.Module):
    """Makes `a`, read by stages 1, 2 and 3."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.l0(x))


class Skip1(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, a):
        b = torch.tanh(self.l1(a)) + a
        return b, b.argmax(1, keepdim=True), b > 0


class Skip2(nn.Module):
    """Uses the skip, a bool and an int value; its forward also has an early output."""

    def __init__(self):
        super().__init__()
        self.l2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, b, top, positive):
        c = self.l2(b) * positive + a
        c = c.scatter(1, top, 1.0)
        return c, c.t()


class Skip3(nn.Module):
    def __init__(self):
        super().__init__()
        self.l3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, c):
        return self.l3(c) * a

    def loss(self, y, target):
        return F.mse_loss(y, target)


def skip_spec(**more):
    """A value used by three later stages, int and bool crossings, outputs of early stages."""
    modules = (Skip0, Skip1, Skip2, Skip3)
    names = [
        (("x",), ("a",)),
        (("a",), ("b", "top", "positive")),
        (("a", "b", "top", "positive"), ("c", "ct")),
        (("a", "c"), ("y",)),
    ]
    stages = [
        StageSpec(m, i, o, states(m), loss_inputs=("y", "target") if m is Skip3 else ())
        for m, (i, o) in zip(modules, names, strict=True)
    ]
    crossings = [
        cross("a", 0, (1, 2, 3)),
        cross("target", 0, (3,), gradient=False),
        cross("b", 1, (2,)),
        cross("top", 1, (2,), gradient=False, dtype=torch.int64, shape=(SAMPLES, 1)),
        cross("positive", 1, (2,), gradient=False, dtype=torch.bool),
        cross("c", 2, (3,)),
    ]
    outputs = {"y": Leaf("y"), "early": (Leaf("ct", 1), [Leaf("b"), None, "fixed"])}
    return spec_of(stages, crossings, [X, TARGET], outputs, MSE, **more)


def plain(spec, modules, values):
    """The stages one after another as one graph: outputs and loss of one micro-batch."""
    values = dict(values)
    for module, stage in zip(modules, spec.stages, strict=True):
        result = module(*(values[name] for name in stage.inputs))
        outputs = (result,) if len(stage.outputs) == 1 else result
        values.update(zip(stage.outputs, outputs or (), strict=True))
    if spec.loss is not None and spec.loss.separate:
        names = spec.stages[-1].loss_inputs
        values[spec.loss.value] = modules[-1].loss(*(values[name] for name in names))
    return values


class Tied0(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)

    def forward(self, tokens):
        return self.embedding(tokens)


class Tied1(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Parameter(torch.zeros(10, WIDTH))

    def forward(self, h):
        return self.l1(h) + self.shared[0]


class Tied2(nn.Module):
    """Owns nothing."""

    def forward(self, g):
        return torch.tanh(g)


class Tied3(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.zeros(10, WIDTH))

    def forward(self, h):
        return F.linear(h, self.head)

    def loss(self, logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tied_spec(**more):
    """An embedding used by three stages; tokens come in a dict."""
    stages = [
        StageSpec(Tied0, ("tokens",), ("h",), {"embedding.weight": "emb.weight"}),
        StageSpec(
            Tied1,
            ("h",),
            ("g",),
            {"l1.weight": "l1.weight", "l1.bias": "l1.bias", "shared": "emb.weight"},
        ),
        StageSpec(Tied2, ("g",), ("f",)),
        StageSpec(Tied3, ("f",), ("logits",), {"head": "emb.weight"}, ("logits", "labels")),
    ]
    crossings = [
        cross("h", 0, (1,), shape=(SAMPLES, 3, WIDTH)),
        cross("g", 1, (2,), shape=(SAMPLES, 3, WIDTH)),
        cross("f", 2, (3,), shape=(SAMPLES, 3, WIDTH)),
        cross("labels", 0, (3,), gradient=False, dtype=torch.int64, shape=(SAMPLES, 3)),
    ]
    inputs = [
        Input("tokens", ("kwargs", "batch", "tokens"), shape=(SAMPLES, 3), dtype=torch.int64),
        Input("labels", ("target", "labels")),
    ]
    return spec_of(
        stages,
        crossings,
        inputs,
        Leaf("logits"),
        LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True),
        aliases={"head.weight": "emb.weight"},
        **more,
    )


IGNORED = -100


class Counted(nn.Module):
    """How many labels are not ignored."""

    def forward(self, labels):
        return (labels != IGNORED).sum()


def weighted_spec(module=Counted, state=None):
    """`tied_spec` with a mean over the labels that are not ignored."""
    weight = StageSpec(module, ("labels",), ("weight",), state or {})
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN, counted=True),), separate=True, weight=weight)
    return dataclasses.replace(tied_spec(), loss=loss)


class Norm0(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return F.dropout(self.bn(self.l0(x)), 0.4, self.training)


class Norm1(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)
        self.l1 = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, h):
        return self.drop(self.l1(self.bn(h)))

    def loss(self, y):
        return (F.dropout(y, 0.3, self.training) ** 2).sum()


class NormWhole(nn.Module):
    """Norm0 and Norm1 in one stage."""

    def __init__(self):
        super().__init__()
        self.first = Norm0()
        self.second = Norm1()

    def forward(self, x):
        return self.second(self.first(x))

    def loss(self, y):
        return self.second.loss(y)


def norm_spec(stages=2, **more):
    """BatchNorm and dropout, functional and in the loss too; the loss is a sum."""
    loss = LossSpec("loss", (LossTerm(Reduction.SUM),), separate=True)
    if stages == 1:
        names = {own: own.replace("second.", "second.") for own in states(NormWhole)}
        whole = StageSpec(NormWhole, ("x",), ("y",), names, ("y",), random_ops=(0, 1, 2))
        return spec_of([whole], [], [X], Leaf("y"), loss, **more)
    both = [
        StageSpec(
            Norm0, ("x",), ("h",), {own: f"first.{own}" for own in states(Norm0)}, random_ops=(0,)
        ),
        StageSpec(
            Norm1,
            ("h",),
            ("y",),
            {own: f"second.{own}" for own in states(Norm1)},
            ("y",),
            random_ops=(1, 2),
        ),
    ]
    return spec_of(both, [cross("h", 0, (1,))], [X], Leaf("y"), loss, **more)


def reference(spec, state, parts, *, seed=0, step=0, train=True):
    """Plain autograd, micro-batch by micro-batch: loss, gradients, outputs, buffers by name.

    Args:
        state: the tensors of the pipeline before the step.
        parts: the inputs of each micro-batch by name.
    """
    modules = []
    for stage in spec.stages:
        module = stage.module().train(train)
        own = module.state_dict()
        for name in own:
            own[name].copy_(state[stage.state[name]])
        modules.append(module)
    weight = 1 / len(parts) if spec.loss.terms[0].reduction is Reduction.MEAN else 1.0
    total = 0.0
    outputs = []
    for number, values in enumerate(parts):
        with SeededRandom(seed, step, number, range(100)):
            found = plain(spec, modules, values)
        (found["loss"] * weight).backward()
        total = total + found["loss"].detach() * weight
        outputs.append({name: value.detach() for name, value in found.items()})
    gradients, buffers = {}, {}
    for module, stage in zip(modules, spec.stages, strict=True):
        for own, parameter in module.named_parameters():
            name = stage.state[own]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = gradients.get(name, 0) + gradient
        buffers.update({stage.state[own]: b for own, b in module.named_buffers()})
    return total, gradients, outputs, buffers


def data_for(name, samples, seed=0):
    """Inputs as a pipeline takes them, the target, and the same by value name."""
    generator = torch.Generator().manual_seed(seed)
    if name == "tied":
        tokens = torch.randint(10, (samples, 3), generator=generator)
        labels = torch.randint(10, (samples, 3), generator=generator)
        return (
            {"batch": {"tokens": tokens}},
            {"labels": labels},
            {"tokens": tokens, "labels": labels},
        )
    x = torch.randn(samples, WIDTH, generator=generator)
    if name == "norm":
        return x, None, {"x": x}
    target = torch.randn(samples, WIDTH, generator=generator)
    return (x,), target, {"x": x, "target": target}


def twice_spec():
    """The skip pipeline, all of it on one device and planned for two replicas."""
    spec = skip_spec()
    return dataclasses.replace(spec, placement=(0,) * len(spec.stages), replicas=2)


SPECS = {"skip": skip_spec, "tied": tied_spec, "norm": norm_spec}
