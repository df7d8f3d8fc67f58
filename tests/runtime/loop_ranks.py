"""A loop that changes what is trained from step to step: on a pipeline, or plain PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from tiny_pipelines import MSE, SAMPLES, TARGET, WIDTH, X, cross, spec_of
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.spec import Leaf, StageSpec

BOUND = 0.01
"""Of the gradients that hooks clamp: those of micro-batches are below it, and their sum is not."""


def held(module, layer):
    """Give a stage the matrix that the first and the last share, and a layer of its own."""
    nn.Module.__init__(module)
    module.shared = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
    setattr(module, layer, nn.Linear(WIDTH, WIDTH).requires_grad_(False))


class Stage0(nn.Module):
    def __init__(self):
        held(self, "l0")

    def forward(self, x):
        return torch.tanh(self.l0(x) @ self.shared)


class Stage1(nn.Module):
    """Makes a value besides that no layer has a part in."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, h):
        return torch.tanh(self.l1(h)), torch.ones_like(h[:, :1])


class Stage2(nn.Module):
    def __init__(self):
        super().__init__()
        self.l2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, g):
        return torch.tanh(self.l2(g))


class Stage3(nn.Module):
    def __init__(self):
        held(self, "l3")

    def forward(self, f, one):
        return self.l3(f @ self.shared) * one

    def loss(self, y, target):
        return F.mse_loss(y, target)


def spec():
    """Four stages of which the third alone is trained; the first and the last share a matrix."""
    shared = {"shared": "l0.shared"}
    stages = [
        StageSpec(Stage0, ("x",), ("h",), shared),
        StageSpec(Stage1, ("h",), ("g", "one")),
        StageSpec(Stage2, ("g",), ("f",)),
        StageSpec(Stage3, ("f", "one"), ("y",), shared, ("y", "target")),
    ]
    crossings = [
        cross("h", 0, (1,), gradient=False),
        cross("target", 0, (3,), gradient=False),
        cross("g", 1, (2,), gradient=False),
        cross("one", 1, (3,), gradient=False, shape=(SAMPLES, 1)),
        cross("f", 2, (3,)),
    ]
    return spec_of(stages, crossings, [X, TARGET], Leaf("y"), MSE)


class Plain(nn.Module):
    """The same as one model of torch, on whole mini-batches."""

    def __init__(self):
        super().__init__()
        for module in (Stage0(), Stage1(), Stage2(), Stage3()):
            for name, child in module.named_children():
                self.add_module(name, child)
        self.l0.register_parameter("shared", nn.Parameter(torch.eye(WIDTH), requires_grad=False))

    def step(self, inputs, target):
        h = torch.tanh(self.l0(inputs[0]) @ self.l0.shared)
        f = torch.tanh(self.l2(torch.tanh(self.l1(h))))
        loss = F.mse_loss(self.l3(f @ self.l0.shared), target)
        loss.backward()
        return loss.detach()


def unfreeze(*names):
    return lambda held: [p.requires_grad_() for name, p in held.items() if name in names]


def freeze(*names):
    return lambda held: [p.requires_grad_(False) for name, p in held.items() if name in names]


def assign(held):
    """What `vector_to_parameters` and many averages of weights do."""
    for parameter in held.values():
        parameter.data = parameter.data * 0.9


def clamp(held):
    for parameter in held.values():
        parameter.requires_grad_()
        parameter.register_hook(lambda gradient: gradient.clamp(-BOUND, BOUND))


def step_after_backward(held):
    """The update within backward of torch's tutorial."""

    def update(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad.sign()

    for parameter in held.values():
        parameter.register_post_accumulate_grad_hook(update)


CHANGES = (
    lambda held: None,
    unfreeze("l1.weight"),
    unfreeze("l0.shared"),
    assign,
    freeze("l2.weight", "l2.bias"),
    freeze("l0.shared"),
    clamp,
    step_after_backward,
)
"""Before each step, of parameters by their names."""


def run(model, share=lambda *batch: batch):
    """The losses, and after every step what each parameter and its gradient is."""
    found = []
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1, momentum=0.9)
    for number, change in enumerate(CHANGES):
        change(parameters)
        generator = torch.Generator().manual_seed(number)
        x, target = torch.randn(2, 7 + number, WIDTH, generator=generator)
        optimizer.zero_grad()
        found.append({"loss": model.step(*share((x,), target))})
        for name, p in parameters.items():
            found[-1][f"{name} gradient"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        found[-1].update({name: p.detach().clone() for name, p in parameters.items()})
    return found


def collect(schedule, replicas):
    """The weights that a pipeline began with, and what became of those that are held here."""
    with Pipeline(spec(), None, schedule=schedule, data_parallel=replicas) as pipe:
        start = {name: tensor.clone() for name, tensor in pipe.gather_state_dict().items()}
        if replicas > 1:
            refuse_hooks_where_gradients_are_left(pipe)
        return start, run(pipe, pipe.shard)


def refuse_hooks_where_gradients_are_left(pipe):
    """A step whose gradients are not reduced, and another one that would reduce them with hooks."""
    weight = dict(pipe.named_parameters())["l2.weight"]
    batch = pipe.shard((torch.randn(8, WIDTH),), torch.randn(8, WIDTH))
    with pipe.no_sync():
        pipe.step(*batch)
    hook = weight.register_hook(torch.clone)
    with pytest.raises(UsageError, match="no_sync"):
        pipe.step(*batch)
    hook.remove()
    pipe.step(*batch)
    pipe.zero_grad()


def main(directory, schedule, replicas):
    torch.save(collect(schedule, replicas), directory / f"{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
