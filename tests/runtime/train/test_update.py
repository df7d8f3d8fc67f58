"""One step of the optimizer, compared with the weights as they were before it."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_pipelines import data_for, skip_spec

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import AgreedError, PipelineError
from gpipe_compiler.runtime.train.data import Batch
from gpipe_compiler.runtime.train.optimizer import Rate, Update


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("clip_norm", "what"), [(None, "a gradient"), (1.0, "the norm of the gradients")]
)
def test_a_gradient_that_is_not_finite(clip_norm, what, value):
    """The loss may be finite all the same; the weights do not change."""
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        parameters = dict(pipe.named_parameters())
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        update = Update(pipe, optimizer, Rate(optimizer, None), clip_norm)
        update([Batch(inputs, target)], 1)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        bias = parameters["model.l1.bias"]
        bias.register_hook(lambda found: found * torch.tensor([1.0] * 5 + [value]))

        with pytest.raises(AgreedError, match=rf"{what} of step 2 is (nan|inf)"):
            update([Batch(inputs, target)], 2)

        assert not bias.grad.isfinite().all()
        for name, parameter in parameters.items():
            assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("rate", [1e40, 1e300])
def test_an_optimizer_that_raises_is_named(rate):
    """A rate of the user's own file: torch cannot add what fp32 does not hold."""
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=rate)
        update = Update(pipe, optimizer, Rate(optimizer, None))
        with pytest.raises(
            PipelineError, match=r"step 1 of SGD, at the learning rate 1e\+\d+, fail"
        ):
            update([Batch(inputs, target)], 1)


def test_a_scheduler_that_raises_is_named():
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 - step))
        update = Update(pipe, optimizer, Rate(optimizer, scheduler))
        with pytest.raises(PipelineError, match=r"step 1 of SGD.* failed: ZeroDivisionError"):
            update([Batch(inputs, target)], 1)
