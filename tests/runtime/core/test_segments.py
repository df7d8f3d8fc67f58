"""Segments that run again in a backward: how often, what lives meanwhile, what is refused.

What they compute is compared with plain autograd in `test_recompute.py`. Memory is compared with
counts of what lives, taken while a pipeline works.
"""

from __future__ import annotations

import pytest
import torch
from tanh_pipeline import Living, tanh_spec
from tiny_pipelines import WIDTH, X, data_for, spec_of, states
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.recompute import SecondRun
from gpipe_compiler.runtime.errors import StageError
from gpipe_compiler.runtime.spec import Leaf, LossSpec, LossTerm, Reduction, Remat, StageSpec

LAYERS = 8


class Segmented(nn.Module):
    """A row of ops that each keep their result, two segments, and a count of their runs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.runs = {"first": 0, "second": 0}

    def forward(self, x):
        x = checkpoint(self.first, x, LAYERS // 2, use_reentrant=False)
        return checkpoint(self.second, x, None, use_reentrant=False)[0]

    def first(self, x, layers):
        self.runs["first"] += 1
        return self._tanhs(x, layers)

    def second(self, x, nothing):
        self.runs["second"] += 1
        assert nothing is None
        return self._tanhs(x, LAYERS // 2), nothing

    def _tanhs(self, x, layers):
        for _ in range(layers):
            x = torch.tanh(x * self.scale)
        return x

    def loss(self, y, target):
        return F.mse_loss(y, target)


def segmented_tanhs(stages, **more):
    """The pipeline of `tanh_spec`, in segments."""
    spec = tanh_spec(stages, **more)
    for stage in spec.stages:
        object.__setattr__(stage, "module", Segmented)
        object.__setattr__(stage, "segments", {"first": (), "second": ()})
    return spec


def runs(remat, schedule, stages, microbatches, workers=None):
    x, target = (*data_for("skip", 2 * microbatches)[0], data_for("skip", 2 * microbatches)[1])
    spec = segmented_tanhs(stages, microbatches=microbatches)
    devices = ["cpu"] * workers if workers else "cpu"
    with Pipeline(spec, None, devices=devices, schedule=schedule, remat=remat) as pipe:
        living = Living(2)
        with living:
            pipe.step((x,), target)
        return living.most, [tuple(stage.runs.values()) for stage in pipe.stages.values()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv"])
def test_every_segment_runs_twice_and_no_more(schedule):
    """Also where a backward comes in two parts, and asks twice for what was saved."""
    for remat, times in ((Remat.NONE, 4), (Remat.SEGMENTS, 8)):
        assert runs(remat, schedule, 2, 4, 1)[1] == [(times, times)] * 2


def test_one_segment_of_one_microbatch_lives_at_a_time():
    """A micro-batch more costs a segment's input for each; without remat, all activations."""
    most = {(remat, m): runs(remat, "gpipe", 1, m)[0] for remat in (*Remat,) for m in (1, 4, 6)}
    assert most[Remat.NONE, 6] - most[Remat.NONE, 4] == 2 * LAYERS
    # The input of the second segment, and the output, which the engine has for the loss alone.
    assert most[Remat.SEGMENTS, 6] - most[Remat.SEGMENTS, 4] <= 2 * 2
    assert most[Remat.SEGMENTS, 1] < most[Remat.FULL, 1] == most[Remat.NONE, 1]
    assert most[Remat.SEGMENTS, 1] <= LAYERS + 2


class Careless(nn.Module):
    """Writes to what a segment was given, after the segment."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x.clone()
        y = checkpoint(self.body, x, use_reentrant=False)
        x.add_(1)
        return y

    def body(self, x):
        return torch.tanh(x * self.w)

    def loss(self, y):
        return y.sum()


def test_what_is_written_to_after_a_segment_is_told():
    stage = StageSpec(Careless, ("x",), ("y",), states(Careless), ("y",), segments={"body": ()})
    spec = spec_of([stage], [], [X], Leaf("y"), LossSpec("loss", (LossTerm(Reduction.SUM),), True))
    with (
        Pipeline(spec, None, remat="segments") as pipe,
        pytest.raises(StageError, match=r"0B.*that body was given has been written to since"),
    ):
        pipe.step(data_for("norm", 8)[0])


def test_a_second_run_that_saves_less_is_told():
    calls = []

    def again():
        calls.append(1)

    run = SecondRun(again, "layer3")
    with run.first():
        y = torch.ones(2, requires_grad=True).exp()
    with pytest.raises(RuntimeError, match="second run of layer3 saved 0 tensors and the first"):
        y.sum().backward()
    assert calls == [1]


def test_what_is_asked_for_twice_is_made_twice():
    """As by functions of one's own that look into what they saved more than once."""
    x = torch.linspace(0, 1, 4, requires_grad=True)
    run = SecondRun(x.exp, "layer3")
    with run.first():
        y = x.exp()
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, x.exp())
    assert torch.equal(second, first)


def test_the_methods_are_the_stages_own_again():
    """Between steps nothing of the engine is left in a stage."""
    spec = segmented_tanhs(1, microbatches=2)
    x, target = (*data_for("skip", 4)[0], data_for("skip", 4)[1])
    with Pipeline(spec, None, devices="cpu", remat="segments") as pipe:
        pipe.step((x,), target)
        (stage,) = pipe.stages.values()
        assert not {"first", "second"} & set(vars(stage))
