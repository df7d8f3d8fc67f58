"""The scaler of a pipeline decides as torch.amp.GradScaler on the plain model, to the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from half_pipelines import PlainLoop, half_data, half_spec, parts_of
from tiny_pipelines import WIDTH, X, cross, spec_of, states
from torch import nn

from gpipe_compiler.runtime.core.distributed import Network
from gpipe_compiler.runtime.core.gradients import PipelineScaler
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.spec import Leaf, LossSpec, LossTerm, Reduction, StageSpec

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = 2.0**10
"""A scale under which the gradients of the tiny pipeline do not overflow."""


def overflowing(parameters, name, steps):
    """Lets one gradient overflow in some steps; gives the counter of steps, to be moved on."""
    now = [0]

    def hook(gradient):
        return torch.full_like(gradient, torch.inf) if now[0] in steps else gradient

    parameters[name].register_hook(hook)
    return now


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "fused"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_decisions_are_those_of_the_plain_loop(devices, optimizer, clip):
    """Scales and weights over steps of which the third overflows, in one gradient of one stage."""
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    }[optimizer]
    spec = half_spec(microbatches=3)
    with Pipeline(spec, None, devices=["cpu"] * devices, schedule="1f1b", precision="fp16") as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), "fp16")
        ours, theirs = make(pipe.parameters()), make(loop.parameters.values())
        scaler = torch.amp.GradScaler("cpu", init_scale=SMALL, growth_interval=2)
        pipe.scaler.update(SMALL)
        pipe.scaler.set_growth_interval(2)
        at = "model.half2.key.weight"
        clocks = [
            overflowing(dict(pipe.named_parameters()), at, {2}),
            overflowing(loop.parameters, at, {2}),
        ]
        scales = []
        for step in range(6):
            before = loop.weights()
            data = half_data(9, step)
            pipe.zero_grad()
            theirs.zero_grad()
            loss = pipe.step(*data)
            expected = loop.step(parts_of(data, 3), scaler.scale)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            if clip:
                scaler.unscale_(theirs)
                norm = torch.nn.utils.clip_grad_norm_(loop.parameters.values(), 0.1)
                pipe.scaler.unscale_(ours)
                assert_same(pipe.clip_grad_norm_(0.1), norm)
            for one, opt in ((pipe.scaler, ours), (scaler, theirs)):
                one.step(opt)
                one.update()
            assert pipe.scaler.state_dict() == scaler.state_dict()
            scales.append(scaler.get_scale())
            for name, parameter in pipe.named_parameters():
                assert torch.equal(parameter, loop.parameters[name]), (step, name)
                assert torch.equal(parameter, before[name]) == (step == 2)
            for clock in clocks:
                clock[0] += 1
    # Grown after two steps, halved by the overflow, grown again after two more.
    assert scales == [SMALL, 2 * SMALL, SMALL, SMALL, 2 * SMALL, 2 * SMALL]


def assert_same(one, other):
    """Equal in bits; nan is nan."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_scale_that_is_too_large_is_found_as_torch_finds_it():
    """From torch's own first scale on, with the overflows that the fp16 values themselves make."""
    spec = half_spec()
    with Pipeline(spec, None, devices=["cpu"] * 4, schedule="1f1b", precision="fp16") as pipe:
        state = {name: 3 * tensor for name, tensor in pipe.state_dict().items()}
        pipe.load_state_dict(state)
        loop = PlainLoop(spec, state, "fp16")
        ours = torch.optim.SGD(pipe.parameters(), lr=1e-4)
        theirs = torch.optim.SGD(loop.parameters.values(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu")
        scales = [pipe.scaler.get_scale()]
        assert scales == [2.0**16]
        for step in range(12):
            data = half_data(8, step)
            pipe.zero_grad()
            theirs.zero_grad()
            pipe.step(*data)
            loop.step(parts_of(data, 4), scaler.scale)
            for one, opt in ((pipe.scaler, ours), (scaler, theirs)):
                one.step(opt)
                one.update()
            assert pipe.scaler.get_scale() == scaler.get_scale()
            scales.append(scaler.get_scale())
            for name, parameter in pipe.named_parameters():
                assert torch.equal(parameter, loop.parameters[name]), (step, name)
    assert scales[-1] < scales[0]
    assert len(set(scales[-4:])) == 1, scales


class Narrow(nn.Module):
    """Its loss is fp16, which cannot hold torch's first scale."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.l0(x)

    def loss(self, y):
        return y.mean()


def test_a_loss_in_16_bits_overflows_where_the_plain_loss_does():
    """Also though the weight of a micro-batch would bring its gradient back into range."""
    stage = StageSpec(Narrow, ("x",), ("y",), states(Narrow), ("y",))
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
    spec = spec_of([stage], [], [X], Leaf("y"), loss)
    with Pipeline(spec, None, devices=["cpu"], precision="fp16") as pipe:
        loop = PlainLoop(spec, pipe.state_dict(), "fp16")
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1)
        theirs = torch.optim.SGD(loop.parameters.values(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        found = []
        for step in range(3):
            data = half_data(8, step)[:1]
            pipe.zero_grad()
            theirs.zero_grad()
            pipe.step(*data)
            loop.step(parts_of(data, 4, ("x",)), scaler.scale, backwards=True)
            for one, opt in ((pipe.scaler, ours), (scaler, theirs)):
                one.step(opt)
                one.update()
            found.append(pipe.scaler.get_scale())
            assert found[-1] == scaler.get_scale()
    assert found == [2.0**15] * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_the_same_loop_steps_as_it_is(precision):
    """The scaler is disabled: it steps, and has no state."""
    with Pipeline(half_spec(), None, devices=["cpu"] * 2, precision=precision) as pipe:
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*half_data(8))
        pipe.scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        pipe.scaler.step(optimizer)
        pipe.scaler.update()
        assert not pipe.scaler.is_enabled()
        assert pipe.scaler.state_dict() == {}
        for name, parameter in pipe.named_parameters():
            assert not torch.equal(parameter, before[name])


def test_the_loss_and_its_weight_are_told_unscaled():
    """`weight` scales the gradients besides, the loss stays that of the mini-batch."""
    with Pipeline(half_spec(), None, devices=["cpu"] * 2, precision="fp16") as pipe:
        pipe.scaler.update(4.0)
        losses, gradients = [], []
        for weight in (1.0, 0.5):
            pipe.step_number = 0
            pipe.zero_grad()
            losses.append(pipe.step(*half_data(8), weight=weight))
            gradients.append({n: p.grad.clone() for n, p in pipe.named_parameters()})
    assert torch.equal(*losses)
    assert 0 < losses[0] < 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name] * 2, gradient, rtol=1e-2, atol=1e-3)


def test_state_goes_through_a_dict():
    """As a checkpoint carries it."""
    first = PipelineScaler(Network.alone(torch.device("cpu")), enabled=True)
    first.update(8.0)
    second = PipelineScaler(Network.alone(torch.device("cpu")), enabled=True)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.get_scale() == 8.0


def test_what_other_ranks_find_decides():
    """A rank without any gradient skips too when another one has found an overflow."""
    words = []

    def over_ranks(tensor, what):
        words.append(what)
        return tensor + 1

    parameter = nn.Parameter(torch.zeros(0))
    for skips in (over_ranks, lambda tensor, what: tensor):
        world = SimpleNamespace(device=torch.device("cpu"), sum=skips)
        scaler = PipelineScaler(world, enabled=True)
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = torch.optim.SGD([parameter, weight], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped = skips is over_ranks
        assert torch.equal(weight, torch.ones(2)) == skipped
        assert scaler.get_scale() == (2.0**15 if skipped else 2.0**16)
    assert words == ["whether gradients have overflowed"]

    alone = PipelineScaler(Network.alone(torch.device("cpu")), enabled=True)
    alone.step(torch.optim.SGD([parameter], lr=1.0))
    alone.update()
    assert alone.get_scale() == 2.0**16


def test_weights_in_fp16_are_refused():
    """Their gradients are fp16, which torch's scaler does not take either."""

    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.l0 = nn.Linear(WIDTH, WIDTH, dtype=torch.float16)

        def forward(self, x):
            return self.l0(x.half())

        def loss(self, y):
            return y.float().mean()

    def spec():
        first = StageSpec(Low, ("x",), ("y",), states(Low))
        last = StageSpec(Low, ("y",), ("z",), states(Low, "b."), ("z",))
        loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
        crossing = cross("y", 0, (1,), dtype=torch.float16)
        return spec_of([first, last], [crossing], [X], Leaf("z"), loss)

    with pytest.raises(UsageError, match=r"l0\.weight of stage 0 is fp16") as caught:
        Pipeline(spec(), None, devices=["cpu"] * 2, precision="fp16")
    assert "--precision fp16" in caught.value.hint
    with Pipeline(spec(), None, devices=["cpu"] * 2, precision="fp32") as pipe:
        pipe.step(half_data(8)[0])
