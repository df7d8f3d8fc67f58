"""A pipeline whose sizes vary from call to call, and its plain model on batches of any size."""

from __future__ import annotations

import torch
from tiny_pipelines import SAMPLES, WIDTH, cross, spec_of, states
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import (
    Input,
    Leaf,
    LossSpec,
    LossTerm,
    Reduction,
    Relation,
    Requirement,
    Samples,
    Size,
    StageSpec,
)

TOKENS = Size("ids.1", of=("ids", 1), example=8)
ITEMS = Size("memory.1", of=("memory", 1), example=4)
WORDS, CLASSES, MOST_TOKENS = 11, 5, 600
BROKEN = 7
"""Tokens that the model's own code fails at."""


class Sized0(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids, mask):
        h = F.dropout(self.words(ids), 0.3, self.training)
        return h * mask[..., None]


class Sized1(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, memory):
        if h.shape[1] == BROKEN:
            raise ValueError("seven tokens")
        scores = torch.softmax(self.inner(h) @ memory.mT, -1)
        return scores, torch.tanh(h[:, ::2]), h.flatten(0, 1)


class Sized2(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, scores, half, rows, memory):
        h = scores @ memory + rows.unflatten(0, scores.shape[:2])
        return self.head(F.dropout(h + half.mean(1, keepdim=True), 0.2, self.training))

    def loss(self, logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def sized_spec(**more):
    """Boundaries of every kind of size: sums, halves, products with the batch, two sizes."""
    stages = [
        StageSpec(Sized0, ("ids", "mask"), ("h",), states(Sized0), random_ops=(0,)),
        StageSpec(Sized1, ("h", "memory"), ("scores", "half", "rows"), states(Sized1)),
        StageSpec(
            Sized2,
            ("scores", "half", "rows", "memory"),
            ("logits",),
            states(Sized2),
            ("logits", "target"),
            random_ops=(1,),
        ),
    ]
    labels = (SAMPLES, TOKENS)
    crossings = [
        cross("h", 0, (1,), shape=(SAMPLES, TOKENS, WIDTH)),
        cross("memory", 0, (1, 2), shape=(SAMPLES, ITEMS, WIDTH), gradient=False),
        cross("target", 0, (2,), shape=labels, dtype=torch.int64, gradient=False),
        cross("scores", 1, (2,), shape=(SAMPLES, TOKENS, ITEMS)),
        cross("half", 1, (2,), shape=(SAMPLES, (TOKENS + 1) // 2, WIDTH)),
        cross("rows", 1, (2,), shape=(SAMPLES * TOKENS, WIDTH)),
    ]
    inputs = [
        Input("ids", ("args", 0), 0, labels, torch.int64),
        Input("mask", ("args", 1), 0, labels, torch.float32),
        Input("memory", ("kwargs", "memory"), 0, (SAMPLES, ITEMS, WIDTH), torch.float32),
        Input("target", ("target",), 0, labels, torch.int64),
    ]
    outputs = {"logits": Leaf("logits"), "tokens": TOKENS, "cells": Samples(TOKENS * ITEMS)}
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN, per_sample=TOKENS),), separate=True)
    requires = (
        Requirement(TOKENS, Relation.AT_MOST, MOST_TOKENS, "model.py:12: self.place[:tokens]"),
        Requirement(ITEMS, Relation.DIVISIBLE, 2, "model.py:30: memory.view(2, -1)"),
    )
    return spec_of(
        stages, crossings, inputs, outputs, loss, requires=requires, **{"microbatches": 2, **more}
    )


def sized_batch(samples, tokens, items, seed=0):
    """Inputs as the pipeline takes them, and the target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (samples, tokens), generator=generator)
    mask = (torch.rand(samples, tokens, generator=generator) < 0.8).float()
    memory = torch.randn(samples, items, WIDTH, generator=generator)
    target = torch.randint(CLASSES, (samples, tokens), generator=generator)
    return ((ids, mask), {"memory": memory}), target


class Plain:
    """The model in one piece."""

    def __init__(self, spec, state):
        self.stages = [stage.module() for stage in spec.stages]
        self.named = {}
        for stage, module in zip(spec.stages, self.stages, strict=True):
            for own, parameter in module.named_parameters():
                parameter.data.copy_(state[stage.state[own]])
                self.named[stage.state[own]] = parameter

    def __call__(self, inputs):
        (ids, mask), kwargs = inputs
        memory = kwargs["memory"]
        made = self.stages[1](self.stages[0](ids, mask), memory)
        return self.stages[2](*made, memory)

    def step(self, microbatches, *, training=True, seed=0, step=0):
        """The mean over all tokens of all micro-batches, its gradients by name, the outputs.

        Args:
            microbatches: pairs of inputs and target.
        """
        for module in self.stages:
            module.train(training)
            module.zero_grad()
        total, outputs = 0.0, []
        tokens = sum(target.numel() for _, target in microbatches)
        for number, (inputs, target) in enumerate(microbatches):
            with SeededRandom(seed, step, number, (0, 1)):
                logits = self(inputs)
            summed = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            (summed / tokens).backward()
            total = total + summed.detach() / tokens
            outputs.append(logits.detach())
        return total, {name: p.grad.clone() for name, p in self.named.items()}, outputs

    def descend(self, rate):
        """A step of SGD."""
        for parameter in self.named.values():
            parameter.data.sub_(rate * parameter.grad)


def split_in(count, inputs, target):
    """A batch in micro-batches, the larger ones first."""
    (ids, mask), kwargs = inputs
    tensors = (ids, mask, kwargs["memory"], target)
    parts = zip(*(torch.tensor_split(tensor, count) for tensor in tensors), strict=True)
    return [(((i, m), {"memory": memory}), t) for i, m, memory, t in parts]
