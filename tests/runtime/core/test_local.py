"""Pipelines on threads do what plain autograd does."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from types import MappingProxyType

import pytest
import torch
from tiny_pipelines import (
    SAMPLES,
    SPECS,
    WIDTH,
    X,
    data_for,
    norm_spec,
    reference,
    skip_spec,
    spec_of,
    states,
    tied_spec,
)
from torch import nn

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.weights import save_weights
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.spec import (
    Input,
    Joined,
    Leaf,
    LossSpec,
    LossTerm,
    Reduction,
    StageSpec,
)


def devices_of(count):
    return ["cpu"] * count


def parts_of(values, microbatches):
    pieces = {name: tensor.chunk(microbatches) for name, tensor in values.items()}
    return [{name: piece[m] for name, piece in pieces.items()} for m in range(microbatches)]


def snapshot(pipe):
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def assert_same(expected, actual):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=5e-6)


CASES = [
    ("skip", 1),
    ("skip", 2),
    ("skip", 4),
    ("tied", 1),
    ("tied", 2),
    ("tied", 4),
    ("norm", 1),
    ("norm", 2),
]


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_step_equals_plain_autograd(name, workers, schedule, microbatches):
    """Loss, every gradient, outputs and buffers, whatever the schedule and the placement."""
    spec = SPECS[name](microbatches=microbatches)
    inputs, target, values = data_for(name, SAMPLES * microbatches)
    with Pipeline(spec, None, devices=devices_of(workers), schedule=schedule, seed=3) as pipe:
        before = snapshot(pipe)
        loss, outputs = pipe.step_with_outputs(inputs, target)
        parts = parts_of(values, microbatches)
        expected, gradients, pieces, buffers = reference(spec, before, parts, seed=3)

        assert_same(expected, loss)
        assert gradients.keys() == dict(pipe.named_parameters()).keys()
        for parameter_name, parameter in pipe.named_parameters():
            assert_same(gradients[parameter_name], parameter.grad)
        for buffer_name, buffer in pipe.named_buffers():
            assert_same(buffers[buffer_name], buffer)
        if name == "skip":
            assert_same(torch.cat([piece["y"] for piece in pieces]), outputs["y"])
            early, rest = outputs["early"]
            assert_same(torch.cat([piece["ct"] for piece in pieces], 1), early)
            assert_same(torch.cat([piece["b"] for piece in pieces]), rest[0])
            assert rest[1:] == [None, "fixed"]


@pytest.mark.parametrize("name", ["skip", "tied"])
def test_training_follows_the_plain_loop(name):
    """Weights stay those of the plain loop over several optimizer steps, tied ones included."""
    spec = SPECS[name]()
    with Pipeline(spec, None, schedule="1f1b") as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.05)
        plain = {n: p.detach().clone().requires_grad_() for n, p in pipe.named_parameters()}
        plain_optimizer = torch.optim.Adam(plain.values(), lr=0.05)
        for step in range(4):
            inputs, target, values = data_for(name, 8, seed=step)
            optimizer.zero_grad()
            pipe.step(inputs, target)
            optimizer.step()
            _, gradients, _, _ = reference(spec, plain, parts_of(values, 4))
            for n, parameter in plain.items():
                parameter.grad = gradients[n]
            plain_optimizer.step()

        for n, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, plain[n], rtol=1e-4, atol=1e-5)
        copies = [s.state_dict() for s in pipe.stages.values()]
        if name == "tied":
            assert torch.equal(copies[0]["embedding.weight"], copies[3]["head"])


def test_gradients_accumulate():
    """As in PyTorch: two steps without zero_grad add up, tied parameters too."""
    inputs, target, _ = data_for("tied", 8)
    with Pipeline(tied_spec(), None) as pipe:
        pipe.step(inputs, target)
        once = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        pipe.step(inputs, target)

        for name, parameter in pipe.named_parameters():
            assert_same(2 * once[name], parameter.grad)
        pipe.zero_grad()
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_dropout_does_not_depend_on_the_cut():
    """One stage and two, and any number of micro-batch orders, give the same masks."""
    x, _, _ = data_for("norm", 8)
    found = []
    for stages, schedule in ((1, "gpipe"), (2, "gpipe"), (2, "1f1b")):
        with Pipeline(norm_spec(stages), None, schedule=schedule, seed=5) as pipe:
            losses = [pipe.step(x) for _ in range(3)]
            found.append((losses, snapshot(pipe), {n: p.grad for n, p in pipe.named_parameters()}))

    assert losses[0] != losses[1]  # another step, other masks
    for losses, state, gradients in found[1:]:
        assert losses == found[0][0]
        for name, tensor in found[0][1].items():
            assert torch.equal(tensor, state[name])
        for name, tensor in found[0][2].items():
            assert_same(tensor, gradients[name])


def test_steps_leave_the_callers_random_state_alone():
    """Neither weights made here nor dropout draw from the caller's generator."""
    x, _, _ = data_for("norm", 8)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with Pipeline(norm_spec(), None) as pipe:
        pipe.step(x)

    assert torch.equal(expected, torch.rand(3))


def test_inference():
    """Outputs in the model's structure, without gradients, without a target."""
    inputs, target, values = data_for("skip", 8)
    with Pipeline(skip_spec(), None).eval() as pipe:
        outputs = pipe(inputs)
        _, _, pieces, _ = reference(skip_spec(), snapshot(pipe), parts_of(values, 4), train=False)

        assert_same(torch.cat([piece["y"] for piece in pieces]), outputs["y"])
        assert not outputs["y"].requires_grad
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert_same(outputs["y"], pipe.step_with_outputs(inputs, target)[1]["y"])


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_inference_takes_any_batch(batch):
    """A batch that does not divide is split into fewer micro-batches."""
    inputs, _, _ = data_for("skip", 12)
    with Pipeline(skip_spec(), None).eval() as pipe:
        assert_same(pipe(inputs)["y"][:batch], pipe((inputs[0][:batch],))["y"])


def test_state_dict_round_trip():
    """Names are the model's, tied names included; another pipeline takes them over."""
    with Pipeline(tied_spec(), None, seed=1) as one, Pipeline(tied_spec(), None, seed=2) as two:
        state = one.state_dict()

        assert set(state) == {"emb.weight", "head.weight", "l1.weight", "l1.bias"}
        assert [name for name, _ in one.named_parameters()] == [
            "emb.weight",
            "l1.weight",
            "l1.bias",
        ]
        two.load_state_dict(state)
        for name, tensor in two.state_dict().items():
            assert torch.equal(state[name], tensor)
        with pytest.raises(UsageError, match=r"l1\.bias is missing; other is unknown"):
            two.load_state_dict(
                {k: v for k, v in state.items() if k != "l1.bias"} | {"other": state["l1.bias"]}
            )
        with pytest.raises(UsageError, match="shape"):
            two.load_state_dict(state | {"l1.bias": torch.zeros(1)}, strict=False)


def test_of_several_names_of_a_tensor_the_last_one_of_the_model_is_loaded():
    """As torch's modules load them, in whatever order they come; each has to fit."""
    with Pipeline(tied_spec(), None) as pipe:
        state = pipe.state_dict()
        for names in (["emb.weight", "head.weight"], ["head.weight", "emb.weight"]):
            numbers = {name: torch.full_like(state[name], len(name)) for name in names}
            pipe.load_state_dict(numbers, strict=False)
            assert_same(pipe.state_dict()["emb.weight"], numbers["head.weight"])
        with pytest.raises(UsageError, match=r"emb\.weight has shape \(1,\)"):
            pipe.load_state_dict(state | {"emb.weight": torch.zeros(1)})


@pytest.mark.parametrize("kind", [UserDict, MappingProxyType, OrderedDict])
def test_any_mapping_gives_arguments_and_holds_tensors(kind):
    """Such as the batches of Hugging Face's tokenizers."""
    inputs, target, _ = data_for("tied", 8)
    with Pipeline(tied_spec(), None) as pipe:
        own = {"batch": kind(inputs["batch"])}
        assert_same(pipe.step(inputs, target), pipe.step(kind(own), kind(target)))


def test_what_initialises_itself_does_not_depend_on_the_cut():
    """Without weights, the same seed gives the same weights for any number of stages."""
    with Pipeline(norm_spec(1), None, seed=4) as one, Pipeline(norm_spec(2), None, seed=4) as two:
        state = two.state_dict()

        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, state[name])
        assert not torch.equal(state["first.l0.weight"], state["second.l1.weight"])


class Frozen(nn.Module):
    """Has an output that depends on nothing trainable, and a scalar of the whole batch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.scale, x.mean(), x.sum(0)


class Unused(nn.Module):
    """Does not use the value whose gradient its maker waits for."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, x):
        return self.l1(x)

    def loss(self, y):
        return y.mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_value_without_a_gradient_makes_nobody_wait(schedule):
    """Where autograd gives none, zeros are taken; means and sums are those of the batch."""
    stages = [
        StageSpec(Frozen, ("x",), ("h", "average", "total"), {"scale": "scale"}),
        StageSpec(Unused, ("h", "x"), ("y",), states(Unused), ("y",)),
    ]
    crossings = [
        dataclasses.replace(skip_spec().crossings[0], value="h", targets=(1,)),
        dataclasses.replace(skip_spec().crossings[0], value="x", targets=(1,), gradient=False),
    ]
    outputs = (
        Leaf("average", None, Joined.MEAN),
        Leaf("total", None, Joined.SUM),
        Leaf("x"),
    )
    spec = spec_of(
        stages, crossings, [X], outputs, LossSpec("loss", (LossTerm(Reduction.MEAN),), True)
    )
    x, _, _ = data_for("norm", 8)
    with Pipeline(spec, None, schedule=schedule) as pipe:
        _, (average, total, same) = pipe.step_with_outputs(x)

        assert_same(x.mean(), average)
        assert_same(x.sum(0), total)
        assert torch.equal(x, same)
        gradients = dict(pipe.named_parameters())
        assert gradients["scale"].grad is None
        assert gradients["model.l1.weight"].grad is not None


def test_inputs_that_are_not_batched_go_to_every_microbatch():
    """Such an input is whole in each micro-batch."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, factor):
            return x * self.w * factor

        def loss(self, y):
            return y.sum()

    inputs = [X, Input("factor", ("kwargs", "factor"), batch_dim=None)]
    stage = StageSpec(Scale, ("x", "factor"), ("y",), {"w": "w"}, ("y",))
    spec = spec_of(
        [stage], [], inputs, Leaf("y"), LossSpec("loss", (LossTerm(Reduction.SUM),), True)
    )
    x, _, _ = data_for("norm", 8)
    with Pipeline(spec, None) as pipe:
        loss = pipe.step(((x,), {"factor": torch.tensor(3.0)}))

        assert_same((x * 3 * pipe.stages[0].w).sum(), loss)


class TiedInside(nn.Module):
    """Two parameters of one stage are one in the model."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(WIDTH))
        self.two = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * self.one + self.two

    def loss(self, y):
        return y.sum()


@pytest.mark.parametrize("stored", [True, False])
def test_names_of_one_tensor_in_a_stage_are_one_tensor(stored, tmp_path):
    """With stored weights and without: one parameter, with the gradients of both uses."""
    stage = StageSpec(TiedInside, ("x",), ("y",), {"one": "w", "two": "w"}, ("y",))
    spec = spec_of([stage], [], [X], Leaf("y"), LossSpec("loss", (LossTerm(Reduction.SUM),), True))
    save_weights({"w": torch.ones(WIDTH)}, tmp_path)
    x, _, _ = data_for("norm", 8)
    with Pipeline(spec, tmp_path if stored else None) as pipe:
        pipe.step(x)
        (parameter,) = pipe.parameters()

        assert pipe.stages[0].one is pipe.stages[0].two
        assert_same(x.sum(0) + 8, parameter.grad)


class Doubled(nn.Module):
    """A stage that has nothing to train."""

    def forward(self, x):
        return x * 2

    def loss(self, y):
        return y.sum()


def test_an_optimizer_can_be_made_where_nothing_is_trained():
    """As in a process under torchrun whose stages have no parameters."""
    stage = StageSpec(Doubled, ("x",), ("y",), {}, ("y",))
    spec = spec_of([stage], [], [X], Leaf("y"), LossSpec("loss", (LossTerm(Reduction.SUM),), True))
    with Pipeline(spec, None) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        pipe.step(torch.ones(4 * SAMPLES, WIDTH))
        optimizer.step()

        assert [parameter.numel() for parameter in pipe.parameters()] == [0]
        assert list(pipe.named_parameters()) == []
        assert pipe.state_dict() == {}


def test_outputs_that_training_has_in_another_structure_are_refused_in_train_mode():
    data = data_for("skip", SAMPLES)
    with Pipeline(dataclasses.replace(skip_spec(), left_out="aux, model.py:3"), None) as pipe:
        for call in (pipe, pipe.step_with_outputs, pipe.evaluate_with_outputs):
            with pytest.raises(UsageError, match=r"aux, model\.py:3") as refused:
                call(*data[: 1 if call is pipe else 2])
            assert "return tensors in the same structure in both modes" in refused.value.hint
        assert all(p.grad is None for p in pipe.parameters())
        pipe.step(*data[:2])
        pipe.evaluate(*data[:2])
        pipe.eval()(data[0])
