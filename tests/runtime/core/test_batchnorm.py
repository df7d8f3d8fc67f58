"""Deferred BatchNorm against torch's own BatchNorm.

The plain model runs micro-batch by micro-batch while hooks collect what each BatchNorm is given.
Torch's BatchNorm, given all of that at once, says what the running statistics have to be. Losses
and gradients are those of the plain model on micro-batches.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norm_pipeline import Net, data, net_spec
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.batchnorm import DeferredStatistics
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.errors import StageError

F64 = torch.float64
MICROBATCHES = 3
SAMPLES = 4


def plain_step(net, parts, weights, *, seed, step):
    """Loss and gradients of the micro-batches, and the statistics that torch gives of them all."""
    layers = {name: layer for name, layer in net.named_modules() if name.startswith("n")}
    before = {name: copy.deepcopy(layer) for name, layer in layers.items()}
    given = {name: [] for name in layers}
    handles = [
        layer.register_forward_hook(lambda _, args, __, name=name: given[name].append(args[0]))
        for name, layer in layers.items()
    ]
    total = 0.0
    for number, ((x, target), weight) in enumerate(zip(parts, weights, strict=True)):
        with SeededRandom(seed, step, number, range(9)):
            loss = F.mse_loss(net(x), target) * weight
        loss.backward()
        total = total + loss.detach()
    for handle in handles:
        handle.remove()
    for name, layer in layers.items():
        calls = len(given[name]) // len(parts)
        for call in range(calls):
            before[name](torch.cat([piece.detach() for piece in given[name][call::calls]]))
        layer.load_state_dict(before[name].state_dict())
    return total


def close(expected, actual, message=None):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=message)


@pytest.mark.parametrize("samples", [SAMPLES * MICROBATCHES, SAMPLES * MICROBATCHES - 2])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("workers", [1, 2])
def test_training_with_deferred_statistics(workers, schedule, remat, samples):
    """Three steps: losses and weights of micro-batches, statistics of mini-batches."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    spec = net_spec(microbatches=MICROBATCHES)
    choices = {"schedule": schedule, "remat": remat, "batchnorm": "deferred"}
    with Pipeline(spec, None, devices=["cpu"] * workers, **choices, seed=6) as pipe:
        pipe.load_state_dict(net.state_dict())
        piped = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(3):
            x, target = data(samples, seed=step)
            sizes = [len(piece) for piece in x.tensor_split(MICROBATCHES)]
            parts = list(zip(x.split(sizes), target.split(sizes), strict=True))
            weights = [size / samples for size in sizes]
            for each in (optimizer, piped):
                each.zero_grad()
            expected = plain_step(net, parts, weights, seed=6, step=step)
            loss = pipe.step((x,), target)
            for each in (optimizer, piped):
                each.step()

            close(expected, loss)
            found = pipe.state_dict()
            assert found.keys() == net.state_dict().keys()
            for name, tensor in net.state_dict().items():
                close(tensor, found[name], f"{name} {found[name]} {tensor}")
        assert found["n2.num_batches_tracked"] == 3
        assert found["n1.num_batches_tracked"] == 6


def test_a_forward_in_training_mode_counts_as_a_minibatch():
    """As the plain model's does, with and without the loss; one in evaluation mode does not."""
    x, target = data(SAMPLES * MICROBATCHES)
    found = []
    for call in (
        lambda pipe: pipe((x,)),
        lambda pipe: pipe.evaluate((x,), target),
        lambda pipe: pipe.step((x,), target),
    ):
        spec = net_spec(microbatches=MICROBATCHES)
        with Pipeline(spec, None, batchnorm="deferred") as pipe:
            before = {name: tensor.clone() for name, tensor in pipe.named_buffers()}
            pipe.eval()
            call(pipe)
            for name, tensor in pipe.named_buffers():
                assert torch.equal(before[name], tensor)
            pipe.train()
            pipe.step_number = 0
            call(pipe)
            found.append({name: tensor.clone() for name, tensor in pipe.named_buffers()})
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor)
    assert found[0]["n0.num_batches_tracked"] == 1


def test_a_failed_step_leaves_no_sums_behind():
    """The step after one that failed is the first step of another pipeline."""
    x, target = data(SAMPLES * MICROBATCHES)
    spec = net_spec(microbatches=MICROBATCHES)
    found = []
    for fails in (False, True):
        with Pipeline(spec, None, devices="cpu", batchnorm="deferred") as pipe:
            if fails:
                calls = []

                def fail(*_, calls=calls):
                    calls.append(0)
                    if len(calls) == MICROBATCHES:
                        raise ValueError("not this one")

                before = {name: tensor.clone() for name, tensor in pipe.named_buffers()}
                handle = pipe.stages[1].register_forward_hook(fail)
                with pytest.raises(StageError, match="not this one"):
                    pipe.step((x * 7,), target)
                handle.remove()
                for name, tensor in pipe.named_buffers():
                    assert torch.equal(before[name], tensor), name
                pipe.step_number = 0
                pipe.zero_grad()
            pipe.step((x,), target)
            found.append({name: tensor.clone() for name, tensor in pipe.named_buffers()})
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


def collected(module, batches, gather=None):
    """A module's statistics after the micro-batches of one mini-batch, no pipeline around it."""
    deferred = DeferredStatistics(module, {})
    for batch in batches:
        with deferred.forward(again=False):
            module(batch)
        with deferred.forward(again=True):
            module(batch * 3)
    if gather is None:
        deferred.commit()
    else:
        deferred.commit(gather)


def test_a_large_mean_costs_no_variance():
    """Mean 10,000 and deviation 1 in float32, where a difference of squares has no digit left."""
    batches = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    layer, expected = nn.BatchNorm1d(3, momentum=1.0), nn.BatchNorm1d(3, momentum=1.0)
    collected(layer, batches)
    expected.double()(batches.double().flatten(0, 1))
    torch.testing.assert_close(
        layer.running_mean.double(), expected.running_mean, rtol=1e-7, atol=0
    )
    torch.testing.assert_close(layer.running_var.double(), expected.running_var, rtol=1e-3, atol=0)


@given(
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=6),
    replicas=st.integers(1, 3),
    momentum=st.sampled_from([None, 0.1, 1.0]),
)
def test_replicas_join_their_statistics(sizes, replicas, momentum):
    """Each replica has the same micro-batch sizes in another order; all end with the same bits."""
    shares = [
        [torch.randn(size, 3, 2, dtype=F64) * (r + 1) + r for size in sizes[r:] + sizes[:r]]
        for r in range(replicas)
    ]
    own = []
    for share in shares:
        collected(
            nn.BatchNorm1d(3, momentum=momentum, dtype=F64), share, lambda t: [own.append(t) or t]
        )
    for share in shares:
        layer = nn.BatchNorm1d(3, momentum=momentum, dtype=F64)
        collected(layer, share, lambda _: own)
        expected = nn.BatchNorm1d(3, momentum=momentum, dtype=F64)
        expected(torch.cat([batch for each in shares for batch in each]))
        for name, tensor in expected.state_dict().items():
            close(tensor, layer.state_dict()[name])


class Odd(nn.Module):
    """Statistics that live only for a call, none at all, and a layer used a second time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("both", torch.zeros(2, 3))
        self.rows = False

    def forward(self, x):
        x = F.batch_norm(x, self.mean.repeat(1), torch.ones(3), training=True)
        x = F.batch_norm(x, None, None, training=True)
        x = F.instance_norm(x[..., None].repeat(1, 1, 2), self.mean, torch.ones(3), momentum=0.5)
        if self.rows:
            x = F.batch_norm(x, self.both[0], self.both[1], training=True)
        return x


def test_what_is_no_running_statistic_of_a_batch():
    """Passed by: what does not outlive the call, and statistics of instances. Views are refused."""
    module, plain = Odd(), Odd()
    x = torch.randn(2, 4, 3)
    collected(module, x[:1])
    plain(x[0])
    plain(x[0] * 3)
    assert torch.equal(plain.mean, module.mean)
    module.rows = True
    with pytest.raises(RuntimeError, match="a part of one"):
        collected(module, x[:1])


def test_buffers_of_lower_precision():
    """Statistics in bfloat16 are what torch's are, to a rounding."""
    batches = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer, expected = nn.BatchNorm1d(3).bfloat16(), nn.BatchNorm1d(3).bfloat16()
    collected(layer, batches)
    expected(batches.flatten(0, 1))
    torch.testing.assert_close(layer.running_var, expected.running_var, rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(layer.running_mean, expected.running_mean, rtol=8e-3, atol=8e-3)


def test_one_value_per_channel():
    """Torch's module refuses it; its function gives no variance, and one of many is no harm."""

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x):
            return torch.batch_norm(x, None, None, self.mean, self.var, True, 1.0, 1e-5, False)

    module = Single()
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 6.0, 3.0]])
    collected(module, x[:, None])
    assert torch.equal(module.mean, torch.tensor([2.0, 4.0, 3.0]))
    assert torch.equal(module.var, torch.tensor([2.0, 8.0, 0.0]))


def test_micro_statistics_are_those_of_the_plain_loop():
    """The default: the counter counts micro-batches."""
    x, target = data(SAMPLES * MICROBATCHES)
    net = Net()
    spec = net_spec(microbatches=MICROBATCHES)
    with Pipeline(spec, None, remat="full", seed=6) as pipe:
        pipe.load_state_dict(net.state_dict())
        pipe.step((x,), target)
        for number, piece in enumerate(x.chunk(MICROBATCHES)):
            with SeededRandom(6, 0, number, range(9)):
                net(piece)
        for name, buffer in pipe.named_buffers():
            # The loop here may sum over more threads than a device of the pipeline has.
            torch.testing.assert_close(buffer, dict(net.named_buffers())[name], msg=name)
