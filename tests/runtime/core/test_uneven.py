"""Batches that do not divide, compared with the plain model run once on the whole of them.

These models mix no samples, so the reference is one forward and backward of the whole mini-batch.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_pipelines import (
    IGNORED,
    SPECS,
    Tied3,
    data_for,
    plain,
    reference,
    skip_spec,
    weighted_spec,
)
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.inputs import even_sizes, microbatch_count
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.train.evaluation import evaluate
from gpipe_compiler.runtime.train.hooks import UserHooks


class ByClass(nn.Module):
    """The weights of the labels' classes, added up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("of_class", torch.ones(10))

    def forward(self, labels):
        return self.of_class[labels[labels != IGNORED]].sum()


def whole_batch(spec, state, values):
    loss, gradients, outputs, _ = reference(spec, state, [values])
    return loss, gradients, outputs[0]


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 7, 11])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("name", "workers"), [("skip", 4), ("skip", 2), ("tied", 4)])
def test_a_mean_is_over_the_whole_batch(name, workers, schedule, samples):
    """Loss, gradients and outputs of a batch of any size are those of one plain run."""
    spec = SPECS[name]()
    inputs, target, values = data_for(name, samples)
    with Pipeline(spec, None, devices=["cpu"] * workers, schedule=schedule) as pipe:
        loss, found = pipe.step_with_outputs(inputs, target)
        expected, gradients, outputs = whole_batch(spec, pipe.state_dict(), values)

        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        for parameter, tensor in pipe.named_parameters():
            torch.testing.assert_close(tensor.grad, gradients[parameter], rtol=1e-5, atol=1e-6)
        if name == "skip":
            torch.testing.assert_close(found["y"], outputs["y"])
            torch.testing.assert_close(found["early"][0], outputs["ct"])


@pytest.mark.parametrize("samples", [2, 4, 5, 8])
@pytest.mark.parametrize("drawn", range(4))
def test_a_mean_over_what_counts(samples, drawn):
    """Ignored labels count in no micro-batch, also where a micro-batch holds no others."""
    spec = weighted_spec()
    inputs, target, values = data_for("tied", samples, seed=drawn)
    ignored = torch.rand(samples, 3, generator=torch.Generator().manual_seed(drawn)) < 0.6
    ignored[0] = True
    ignored[-1, 0] = False
    labels = target["labels"].masked_fill(ignored, IGNORED)
    with Pipeline(spec, None) as pipe:
        loss = pipe.step(inputs, {"labels": labels})
        evaluated = pipe.evaluate(inputs, {"labels": labels})
        expected, gradients, _ = whole_batch(spec, pipe.state_dict(), {**values, "labels": labels})

        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(evaluated, loss)
        for parameter, tensor in pipe.named_parameters():
            torch.testing.assert_close(tensor.grad, gradients[parameter], rtol=1e-5, atol=1e-6)


def test_a_batch_in_which_nothing_counts():
    """The plain loss is nan there, and no gradient is."""
    spec = weighted_spec()
    inputs, target, _ = data_for("tied", 4)
    with Pipeline(spec, None) as pipe:
        loss = pipe.step(inputs, {"labels": torch.full_like(target["labels"], IGNORED)})

        assert loss.isnan()
        for _, parameter in pipe.named_parameters():
            assert parameter.grad is None or torch.equal(
                parameter.grad, torch.zeros_like(parameter)
            )


def test_labels_that_cannot_be_counted():
    """A label of no class is the caller's mistake, and told as one."""
    spec = weighted_spec(ByClass, {"of_class": "loss.of_class"})
    inputs, target, _ = data_for("tied", 4)
    labels = target["labels"].clone()
    labels[2, 0] = 10
    with Pipeline(spec, None) as pipe:
        for call in (pipe.step, pipe.evaluate, pipe.loss_weights):
            with pytest.raises(UsageError, match=r"cannot be counted: IndexError.*index 10 is out"):
                call(inputs, {"labels": labels})
        pipe.step(inputs, target)
        assert pipe.step_number == 1


class HalfWeights(nn.Module):
    """Half the labels that are not ignored."""

    def forward(self, labels):
        return (labels != IGNORED).sum() / 2


class Floored(Tied3):
    """A sum over labels, divided by half their number, by 2 at least, and 1."""

    def loss(self, logits, target):
        total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return total / ((target != IGNORED).sum() / 2).clamp(min=2.0).add(1.0)


def test_evaluation_is_as_that_of_one_mini_batch_whatever_a_mean_is_divided_by():
    """Mini-batches below and above the floor, one in which nothing counts."""
    spec = weighted_spec(HalfWeights)
    last = dataclasses.replace(spec.stages[-1], module=Floored)
    term = dataclasses.replace(spec.loss.terms[0], floor=2.0, offset=1.0)
    loss = dataclasses.replace(spec.loss, terms=(term,))
    spec = dataclasses.replace(spec, stages=(*spec.stages[:-1], last), loss=loss)
    inputs, target, _ = data_for("tied", 8)
    tokens, labels = inputs["batch"]["tokens"], target["labels"].clone()
    labels[0:2] = labels[2, 1:] = IGNORED
    parts = zip(tokens.split([2, 1, 5]), labels.split([2, 1, 5]), strict=True)
    batches = [({"batch": {"tokens": own}}, {"labels": known}) for own, known in parts]
    with Pipeline(spec, None) as pipe:
        found = evaluate(pipe, UserHooks("model.py", eval_data=lambda: batches))
        whole = pipe.eval().evaluate({"batch": {"tokens": tokens}}, {"labels": labels})

        assert found.loss == pytest.approx(float(whole), rel=1e-6)


def test_weights_of_classes_are_state_of_the_model():
    """They are loaded with the rest of the model's state."""
    spec = weighted_spec(ByClass, {"of_class": "loss.of_class"})
    inputs, target, _ = data_for("tied", 4)
    of_class = torch.arange(10.0) + 1
    with Pipeline(spec, None) as pipe:
        pipe.load_state_dict({"loss.of_class": of_class}, strict=False)
        pipe.step(inputs, target)
        parts = [
            ({"batch": {"tokens": part}}, {"labels": part}) for part in target["labels"].split(1)
        ]

        assert [pipe.loss_weights(*part) for part in parts] == [
            (float(of_class[own["labels"]].sum()),) for _, own in parts
        ]


@pytest.mark.parametrize("name", ["skip", "tied"])
def test_accumulation_is_the_plain_loop_of_small_losses(name):
    """Two mini-batches of weight one half are the mean of both; the loss is told unweighted."""
    spec = SPECS[name]()
    batches = [data_for(name, 5, seed=seed) for seed in range(2)]
    with Pipeline(spec, None) as pipe:
        found = [pipe.step(inputs, target, weight=0.5) for inputs, target, _ in batches]
        plain = [whole_batch(spec, pipe.state_dict(), values) for _, _, values in batches]

        for loss, (expected, _, _) in zip(found, plain, strict=True):
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        for parameter, tensor in pipe.named_parameters():
            mean = sum(gradients[parameter] for _, gradients, _ in plain) / 2
            torch.testing.assert_close(tensor.grad, mean, rtol=1e-5, atol=1e-6)


def test_evaluation_leaves_no_gradient_and_no_step():
    """The loss and the outputs of a mini-batch, as the plain model gives them."""
    spec = skip_spec()
    inputs, target, values = data_for("skip", 6)
    with Pipeline(spec, None) as pipe:
        pipe.eval()
        loss, outputs = pipe.evaluate_with_outputs(inputs, target)
        modules = list(pipe.stages.values())
        with torch.no_grad():
            expected = plain(spec, modules, values)

        torch.testing.assert_close(loss, expected["loss"])
        torch.testing.assert_close(outputs["y"], expected["y"])
        assert pipe.step_number == 0
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_batchnorm_gets_two_samples():
    """Where a stage normalises over samples, a small batch makes fewer micro-batches."""
    spec = SPECS["norm"]()
    mixing = tuple(dataclasses.replace(stage, mixes=True) for stage in spec.stages)
    inputs, _, values = data_for("norm", 5)
    with Pipeline(dataclasses.replace(spec, stages=mixing), None) as pipe:
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        loss = pipe.step(inputs)
        parts = [{"x": part} for part in values["x"].split([3, 2])]

        expected, _, _, buffers = reference(spec, state, parts)
        torch.testing.assert_close(loss, expected)
        for name, buffer in pipe.named_buffers():
            torch.testing.assert_close(buffer, buffers[name])


@pytest.mark.parametrize(("planned", "count"), [(1, 5), (2, 2)])
def test_batchnorm_gets_one_sample_where_that_was_planned(planned, count):
    spec = SPECS["norm"]()
    stages = tuple(dataclasses.replace(stage, mixes=True) for stage in spec.stages)
    spec = dataclasses.replace(spec, stages=stages, microbatch_size=planned)

    assert microbatch_count(spec, 5, 8) == count


def test_an_inference_package_has_no_loss():
    """It says so, and how to get one."""
    spec = dataclasses.replace(skip_spec(), loss=None)
    inputs, target, _ = data_for("skip", 4)
    with Pipeline(spec, None) as pipe, pytest.raises(UsageError, match="has no loss"):
        pipe.evaluate(inputs, target)


@pytest.mark.parametrize(
    ("samples", "parts", "sizes"), [(8, 4, (2, 2, 2, 2)), (7, 3, (3, 2, 2)), (2, 2, (1, 1))]
)
def test_sizes_differ_by_one(samples, parts, sizes):
    """Worked by hand: the larger ones come first."""
    assert even_sizes(samples, parts) == sizes
    assert even_sizes(3 * samples, parts, 3) == tuple(3 * size for size in sizes)
    assert even_sizes(3 * samples + 2, parts, 3)[-1] == 3 * sizes[-1] + 2
