"""What pipelines refuse, and how they fail: one clear error, and no thread is left."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from tiny_pipelines import WIDTH, data_for, skip_spec, spec_of, states, tied_spec
from torch import nn

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import StageError, UsageError
from gpipe_compiler.runtime.spec import Leaf, StageSpec


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (torch.ones(0, WIDTH), torch.ones(0, WIDTH), "the batch is empty, x has no samples"),
        (torch.ones(8, WIDTH), None, "target is missing; a tensor is needed"),
        ({"x": torch.ones(8, WIDTH)}, torch.ones(8), "positional argument 0 is missing"),
        (torch.ones(8, WIDTH), torch.ones(4, WIDTH), "x has 8 samples, target has 4"),
        ((torch.ones(8, 6), torch.ones(8)), torch.ones(8, 6), "takes no positional argument 1"),
        (("text",), torch.ones(8, WIDTH), "positional argument 0 is str"),
        (torch.tensor(1.0), torch.ones(8, WIDTH), "no dimension 0 to split"),
    ],
)
def test_wrong_inputs_are_refused(inputs, target, message):
    """One clear sentence, and the pipeline is as good as before."""
    with Pipeline(skip_spec(), None) as pipe:
        with pytest.raises(UsageError, match=message) as caught:
            pipe.step(inputs, target)
        assert caught.traceback[-1].path.name == "inputs.py"  # where it was found
        good, target, _ = data_for("skip", 8)
        pipe.step(good, target)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(8, 3), "is of torch.float32, the model was compiled for torch.int64"),
        (torch.zeros(8, 4, dtype=torch.int64), "has shape 8x4, the model was compiled for batchx3"),
    ],
)
def test_wrong_tensors_are_refused(tokens, message):
    """What the spec knows of an input is compared with what comes."""
    with Pipeline(tied_spec(), None) as pipe, pytest.raises(UsageError, match=message):
        pipe.step({"batch": {"tokens": tokens}}, {"labels": torch.zeros(8, 3, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": ["cpu"] * 3}, "4 stages cannot be spread over 3"),
        ({"devices": ["nowhere"]}, "nowhere"),
        ({"microbatches": 0}, "at least one"),
        ({"schedule": "fast"}, "no schedule 'fast'; there are gpipe, 1f1b"),
        ({"transport": "pigeon"}, "no transport 'pigeon'; there are local, distributed"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    """The constructor says what it does not take."""
    with pytest.raises(UsageError, match=message):
        Pipeline(skip_spec(), None, **arguments)


class Failing(nn.Module):
    """Fails at one micro-batch, forward or backward; slow elsewhere so that others wait."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, a):
        if a.sum() > 1000:
            raise ValueError("too large")
        y = self.l1(a)
        y.register_hook(self.check)
        return y

    def check(self, gradient):
        if gradient.abs().sum() > 1000:
            raise ValueError("gradient too large")

    def loss(self, y, target):
        return (y * target).mean()


def failing_spec():
    spec = skip_spec()
    first = spec.stages[0]
    last = StageSpec(Failing, ("a",), ("y",), states(Failing), ("y", "target"))
    crossings = [
        dataclasses.replace(spec.crossings[0], targets=(1,)),
        dataclasses.replace(spec.crossings[1], targets=(1,)),
    ]
    return spec_of([first, last], crossings, spec.inputs, Leaf("y"), spec.loss)


def stage_threads() -> set[threading.Thread]:
    """Those of all pipelines of this process, of other tests' too."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("stage-")}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_error_in_a_stage_stops_all_workers(schedule):
    """It names stage, micro-batch and action, keeps the traceback, and nothing hangs."""
    before = stage_threads()
    x = torch.zeros(8, WIDTH)
    target = torch.ones(8, WIDTH)
    bad = target.clone()
    bad[4] = 1e9
    with Pipeline(failing_spec(), None, schedule=schedule) as pipe:
        with pytest.raises(
            StageError, match=r"stage 1, backward of micro-batch 2 \(1B2\): ValueError: gradient"
        ) as raised:
            pipe.step(x, bad)
        assert isinstance(raised.value.__cause__, ValueError)
        pipe.stages[0].l0.bias.data.fill_(0.1)
        pipe.zero_grad()
        assert torch.isfinite(pipe.step(x, target))
    assert stage_threads() <= before


def test_a_forgotten_pipeline_ends_its_threads():
    """Without close(), its threads end with it."""
    before = stage_threads()
    pipe = Pipeline(skip_spec(), None)
    pipe.step(*data_for("skip", 8)[:2])
    assert not stage_threads() <= before
    del pipe
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if stage_threads() <= before:
            return
        time.sleep(0.01)
    raise AssertionError("threads are left")
