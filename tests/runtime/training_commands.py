"""Calls of the training command on pipelines written by hand, and the plain loop beside them."""

from __future__ import annotations

import json
import math

import torch
from tiny_pipelines import WIDTH, plain

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.weights import load_file
from gpipe_compiler.runtime.train.command import main

SIZES = (8, 8, 5, 3)
"""Of the mini-batches of a pass; the last has fewer samples than there are micro-batches."""

DATA = f"""
import os, random, signal
import torch

SIZES = {SIZES}

def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, {WIDTH}, generator=generator)
    return (x,), x.flip(1)
"""

PLAIN = """
def train_data():
    for number, size in enumerate(SIZES):
        yield batch(size, number)

def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)
"""

SHUFFLED = """
def train_data():
    # An order and numbers that all generators have a say in.
    items = [batch(8, number)[0] for number in range(3)]
    random.shuffle(items)
    for number in torch.randperm(3).tolist():
        (x,) = items[number]
        yield x + 0.1 * torch.randn(()), None

def make_optimizer(params):
    return torch.optim.Adam(params, lr=0.05)

def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""

EVALUATION = """
def eval_data():
    random.random()
    for number, size in enumerate((7, 2, 6)):
        x = batch(size, 50 + number)[0][0]
        yield x + 0 * torch.randn(()), TARGET(x)
"""

METRICS = """
TARGET = lambda x: x.flip(1)

def metrics(output, target):
    assert target.shape == output["y"].shape
    return {"mistake": (output["y"] - target).abs().mean(), "samples": len(target)}
"""

LOG = """
import json, pathlib

def log(step, metrics):
    assert all(type(number) is float for number in metrics.values())
    with pathlib.Path(__file__).with_name("own.jsonl").open("a") as file:
        print(json.dumps([step, metrics]), file=file)
"""

BROKEN = """
def train_data():
    for number in range(4):
        (x,), target = batch(8, number)
        yield (x,), target * (float("{value}") if number == 2 else 1)
"""


class Run:
    """Calls of the command on one package; what the last one has left."""

    def __init__(self, folder, spec, hooks):
        self.folder = folder
        self.spec = spec
        self.hooks = folder / "model.py"
        self.hooks.write_text(DATA + hooks)
        self.log = folder / "train.jsonl"
        self.saved = folder / "out.safetensors"

    def __call__(self, *words):
        self.saved.unlink(missing_ok=True)
        given = [
            "train",
            "--log-file",
            str(self.log),
            "--save",
            str(self.saved),
            "--devices",
            "cpu",
        ]
        return main(self.spec, self.folder, None, str(self.hooks), [*given, *map(str, words)])

    @property
    def weights(self):
        return load_file(self.saved)

    @property
    def lines(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def steps(self):
        return [line for line in self.lines if "step" in line]

    @property
    def evaluations(self):
        return [line["evaluation"] for line in self.lines if "evaluation" in line]

    @property
    def logged(self):
        """The steps and numbers that `LOG` was given."""
        return [json.loads(line) for line in (self.folder / "own.jsonl").read_text().splitlines()]

    def initial(self):
        with Pipeline(self.spec, None, devices="cpu") as pipe:
            return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def plain_modules(spec, state):
    """The stages, one after another a plain model, with these weights."""
    modules = [stage.module() for stage in spec.stages]
    for module, stage in zip(modules, spec.stages, strict=True):
        own = module.state_dict()
        for name in own:
            own[name].copy_(state[stage.state[name]])
    return modules


def batches(sizes, seed=0):
    for number, size in enumerate(sizes, seed):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(size, WIDTH, generator=generator)
        yield {"x": x, "target": x.flip(1)}


def plain_loop(spec, state, *, passes, accumulate=1, clip=None, schedule=None):
    """What anybody would write: weights, losses, rates and norms of the steps."""
    modules = plain_modules(spec, state)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    scheduler = schedule(optimizer) if schedule else None
    told = []
    for _ in range(passes):
        items = list(batches(SIZES))
        for start in range(0, len(items), accumulate):
            group = items[start : start + accumulate]
            optimizer.zero_grad()
            total = 0.0
            for values in group:
                loss = plain(spec, modules, values)["loss"]
                (loss / len(group)).backward()
                total += loss.item() / len(group)
            bound = math.inf if clip is None else clip
            norm = torch.nn.utils.clip_grad_norm_(parameters, bound).item()
            told.append((total, optimizer.param_groups[0]["lr"], norm))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    weights = {
        stage.state[own]: tensor
        for module, stage in zip(modules, spec.stages, strict=True)
        for own, tensor in module.state_dict().items()
    }
    return weights, told


def assert_same(run, other):
    """Weights and log, bit by bit."""
    for name, tensor in other.weights.items():
        assert torch.equal(run.weights[name], tensor), name
    timeless = [[{**line, "seconds": 0} for line in side.steps] for side in (run, other)]
    assert timeless[0] == timeless[1]
