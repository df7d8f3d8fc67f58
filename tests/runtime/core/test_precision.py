"""Pipelines under autocast are bit for bit the plain loop under torch.autocast, on the CPU.

The plain loop runs the micro-batches one by one, in the order in which the schedule accumulates
their gradients.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from half_pipelines import DTYPES, PlainLoop, half_data, half_spec, parts_of
from safetensors.torch import save_file
from tiny_pipelines import WIDTH, X, cross, spec_of, states, tied_spec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.spec import Leaf, StageSpec
from gpipe_compiler.runtime.train.check import check_pipeline
from gpipe_compiler.runtime.train.comparison import ComparedKind, pack
from gpipe_compiler.runtime.train.plain_stages import LOSS_SCALE

pytestmark = pytest.mark.usefixtures("one_thread")

LOWER = ["bf16", "fp16"]


def pipeline(spec, devices=1, **more):
    pipe = Pipeline(spec, None, devices=["cpu"] * devices, **more)
    if pipe.scaler.is_enabled():
        pipe.scaler.update(1.0)
    return pipe


@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize(
    ("devices", "schedule", "remat"),
    list(itertools.product((1, 2, 4), ("gpipe", "1f1b"), ("none", "full"))),
)
def test_training_is_that_of_the_plain_loop(precision, devices, schedule, remat):
    """Losses and weights over five steps, with a value for three later stages, in all bits."""
    spec = half_spec()
    with pipeline(spec, devices, schedule=schedule, remat=remat, precision=precision) as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), precision)
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(loop.parameters.values(), lr=0.1, momentum=0.9)
        for step in range(5):
            data = half_data(8, step)
            pipe.zero_grad()
            theirs.zero_grad()
            loss, outputs = pipe.step_with_outputs(*data)
            backwards = schedule == "gpipe"
            expected = loop.step(parts_of(data, 4), backwards=backwards)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            assert outputs["a"].dtype == DTYPES[precision]
            ours.step()
            theirs.step()
            for name, parameter in pipe.named_parameters():
                assert torch.equal(parameter, loop.parameters[name]), (step, name)


@pytest.mark.parametrize("precision", LOWER)
def test_evaluation_and_inference_are_those_of_the_plain_model(precision):
    """In eval mode, between steps, on three devices' worth of threads."""
    spec = half_spec()
    with pipeline(spec, 4, precision=precision) as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), precision)
        data = half_data(8)
        pipe.step(*data)
        pipe.eval()
        loop.train(False)
        found = [loop.forward(values) for values in parts_of(data, 4)]

        outputs = pipe(data[0])
        loss = pipe.evaluate(*data)

    for name in ("y", "a"):
        expected = torch.cat([values[name] for values in found])
        assert outputs[name].dtype == expected.dtype == DTYPES[precision]
        assert torch.equal(outputs[name], expected)
    torch.testing.assert_close(loss, torch.stack([v["loss"] for v in found]).mean())


def test_fp32_is_the_model_as_it_is():
    """No autocast: everything stays fp32."""
    with pipeline(half_spec(), 2, precision="fp32") as pipe:
        _, outputs = pipe.step_with_outputs(*half_data(8))
    assert {tensor.dtype for tensor in outputs.values()} == {torch.float32}


class Casts(TorchDispatchMode):
    """Counts how often each of some tensors is cast."""

    def __init__(self, tensors):
        super().__init__()
        self.found = {id(tensor): 0 for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.found:
            self.found[id(args[0])] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_weight_is_cast_once_a_step(remat):
    """Not for every micro-batch, whose graphs would hold as many copies; and anew each step."""
    with pipeline(half_spec(), 1, remat=remat, precision="bf16") as pipe:
        weights = [p for name, p in pipe.named_parameters() if "norm" not in name]
        for _ in range(2):
            with Casts(weights) as casts:
                pipe.step(*half_data(8))
            assert set(casts.found.values()) == {1}


def test_no_cast_outlives_its_step():
    """Also where the caller's own autocast, switched off, is left only after several steps."""
    spec = half_spec()
    with pipeline(spec, 1, precision="bf16") as pipe:
        with torch.autocast("cpu", enabled=False):
            first = pipe.step(*half_data(8))
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.zero_()
            second = pipe.step(*half_data(8, 0))
        loop = PlainLoop(spec, pipe.state_dict(), "bf16")
        expected = loop.step(parts_of(half_data(8), 4))
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, expected)


def test_the_tied_weights_of_several_stages_are_summed_in_fp32():
    """The plain model sums them in 16 bits, as it casts the tied weight once; to that rounding."""
    spec = tied_spec()
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(10, (2, 8, 3), generator=generator)
    with pipeline(spec, 2, precision="bf16") as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), "bf16")
        pipe.step({"batch": {"tokens": tokens}}, {"labels": labels})
        loop.step(parts_of((tokens, labels), 4, ("tokens", "labels")))
        for name, parameter in pipe.named_parameters():
            expected = loop.gradients()[name]
            allowed = 2 * torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=allowed)


class Twice0(nn.Module):
    """Shares its weight with the next stage."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.l0(x)


class Twice1(Twice0):
    def loss(self, y):
        return y.float().pow(2).mean()


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("precision", LOWER)
def test_a_check_allows_for_the_sum_in_16_bits(precision, broken, tmp_path):
    """And for no more: a gradient that one of the stages has left out is told."""
    names = {"l0.weight": "l.weight", "l0.bias": "l.bias"}
    stages = [
        StageSpec(Twice0, ("x",), ("h",), names),
        StageSpec(Twice1, ("h",), ("y",), names, ("y",)),
    ]
    spec = spec_of(stages, [cross("h", 0, (1,))], [X], Leaf("y"), half_spec().loss)
    data = half_data(8)[:1]
    with Pipeline(spec, None, devices=["cpu"] * 2, precision=precision) as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), precision)
        parts = parts_of(data, 4, ("x",))
        with torch.no_grad():
            outputs = torch.cat([loop.forward(part)["y"] for part in parts])
        loss = loop.step(parts, lambda loss: LOSS_SCALE * loss)
        gradients = {name: g / LOSS_SCALE for name, g in loop.gradients().items()}
        if broken:
            gradients["l.weight"] *= 0.8
        after = {name: p - gradients[name] for name, p in loop.weights().items()}
        reference = {
            ComparedKind.OUTPUT: {"output": outputs},
            ComparedKind.LOSS: {"loss": loss},
            ComparedKind.GRADIENT: gradients,
            ComparedKind.WEIGHT: after,
        }
        save_file(pack(reference), tmp_path / "reference.safetensors")
        rows = check_pipeline(pipe, None, data[0], None, [tmp_path / "reference.safetensors"])
    found = {row.what: row for row in rows}
    assert found["output"].passed
    assert found["loss"].passed
    assert found["gradient"].relative > 1e-5
    assert found["gradient"].passed is not broken
    assert found["weight"].passed is not broken


class Lower0(nn.Module):
    """A stage in 16 bits by itself."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x):
        return self.l0(x.to(torch.bfloat16))


class Lower1(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, h):
        return self.l1(h)

    def loss(self, y):
        return y.float().pow(2).mean()


def lower_spec():
    stages = [
        StageSpec(Lower0, ("x",), ("h",), states(Lower0)),
        StageSpec(Lower1, ("h",), ("y",), states(Lower1), ("y",)),
    ]
    loss = half_spec().loss
    return spec_of(stages, [cross("h", 0, (1,), dtype=torch.bfloat16)], [X], Leaf("y"), loss)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_in_16_bits_themselves(precision):
    """Their weights are bf16, with autocast and without."""
    spec = lower_spec()
    with pipeline(spec, 2, precision=precision, schedule="1f1b") as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), precision)
        data = half_data(8)
        pipe.step(data[0])
        loop.step(parts_of(data[:1], 4, ("x",)))
        for name, parameter in pipe.named_parameters():
            assert parameter.grad.dtype is torch.bfloat16
            assert torch.equal(parameter.grad, loop.gradients()[name])


def test_autocast_around_the_pipeline_is_refused():
    """It would reach the calling thread only."""
    with (
        pipeline(half_spec(), 2) as pipe,
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UsageError) as caught,
    ):
        pipe.step(*half_data(8))
    assert "precision='bf16'" in caught.value.hint


def test_an_unknown_precision_is_refused():
    """By the names that there are."""
    with pytest.raises(UsageError, match="fp32, bf16, fp16"):
        Pipeline(half_spec(), None, precision="int8")
