"""Recomputing pipelines against plain autograd, which runs every forward once.

Memory is compared with counts of what lives, taken inside the stages.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from norm_pipeline import data, net_spec
from segmented import segmented
from stateful_pipeline import F64, Averaged, Head, stateful_data, stateful_spec
from tanh_pipeline import Living, tanh_spec
from tiny_pipelines import (
    SPECS,
    WIDTH,
    X,
    data_for,
    reference,
    spec_of,
    states,
)
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.written import WrittenBuffers
from gpipe_compiler.runtime.errors import StageError
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    Leaf,
    LossSpec,
    LossTerm,
    Reduction,
    Remat,
    StageSpec,
)

MICROBATCHES = 5
SCHEDULES = ("gpipe", "1f1b")
PLACES = [
    *(("gpipe", 1), ("gpipe", 2), ("gpipe", 4), ("1f1b", 1), ("1f1b", 2), ("1f1b", 4)),
    *(("zb-h1", 1), ("zb-h1", 2), ("zb-h1", 4), ("interleaved", 2), ("zbv", 2)),
]
"""Schedules, and devices that they can have four stages on."""


WAYS = [(remat, False) for remat in (Remat.NONE, Remat.FULL)] + [(remat, True) for remat in Remat]
"""What is recomputed, and whether the stages have a segment: it may stand in one that keeps all."""


def made(spec, segment):
    return segmented(spec) if segment else spec


def parts_of(values, microbatches=MICROBATCHES):
    pieces = {name: tensor.chunk(microbatches) for name, tensor in values.items()}
    return [{name: piece[m] for name, piece in pieces.items()} for m in range(microbatches)]


def snapshot(pipe):
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def close(expected, actual):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("schedule", "workers"), PLACES)
@pytest.mark.parametrize("remat", list(Remat))
def test_state_and_random_numbers_are_those_of_one_forward(remat, schedule, workers):
    """Three steps with an optimizer: losses, gradients, outputs; buffers to the last bit."""
    plain = stateful_spec(microbatches=MICROBATCHES)
    spec = made(plain, remat is Remat.SEGMENTS)
    devices = ["cpu"] * workers
    with Pipeline(spec, None, devices=devices, schedule=schedule, remat=remat, seed=4) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(3):
            x, target = stateful_data(2 * MICROBATCHES, seed=step)
            before = snapshot(pipe)
            optimizer.zero_grad()
            loss, outputs = pipe.step_with_outputs((x,), target)
            parts = parts_of({"x": x, "target": target})
            expected, gradients, pieces, buffers = reference(
                plain, before, parts, seed=4, step=step
            )

            close(expected, loss)
            for name in ("y", "h"):
                close(torch.cat([piece[name] for piece in pieces]), outputs[name])
            for name, parameter in pipe.named_parameters():
                assert (parameter.grad is None) == (not parameter.requires_grad)
                if parameter.grad is not None:
                    close(gradients[name], parameter.grad)
            found = dict(pipe.named_buffers())
            assert len(found) == 5
            for name, buffer in found.items():
                assert torch.equal(buffers[name], buffer), name
            optimizer.step()
        assert found["model.bn.num_batches_tracked"] == 3 * MICROBATCHES


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("remat", [Remat.FULL, Remat.SEGMENTS])
def test_pipelines_recompute(remat, name, schedule, workers):
    """Skips to several stages, integer crossings, tied weights, losses that are sums."""
    spec = SPECS[name](microbatches=MICROBATCHES)
    stages = [
        dataclasses.replace(
            stage, writes=tuple(n for n, _ in stage.module().named_buffers()), remat=remat
        )
        for stage in spec.stages
    ]
    plain = dataclasses.replace(spec, stages=tuple(stages))
    spec = made(plain, remat is Remat.SEGMENTS)
    inputs, target, values = data_for(name, 2 * MICROBATCHES)
    with Pipeline(spec, None, devices=["cpu"] * workers, schedule=schedule, seed=3) as pipe:
        before = snapshot(pipe)
        loss = pipe.step(inputs, target)
        expected, gradients, _, buffers = reference(plain, before, parts_of(values), seed=3)

        torch.testing.assert_close(loss, expected)
        for parameter_name, parameter in pipe.named_parameters():
            torch.testing.assert_close(gradients[parameter_name], parameter.grad)
        for buffer_name, buffer in pipe.named_buffers():
            assert torch.equal(buffers[buffer_name], buffer)


def bits(pipe, *call, steps=2):
    """All that steps come to."""
    losses = [pipe.step(*call) for _ in range(steps)]
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    return losses, gradients, snapshot(pipe)


def assert_same_bits(one, *others):
    for other in others:
        assert torch.equal(torch.stack(one[0]), torch.stack(other[0]))
        for mine, theirs in zip(one[1:], other[1:], strict=True):
            assert mine.keys() == theirs.keys()
            for name, tensor in mine.items():
                assert (tensor is None) == (theirs[name] is None), name
                assert tensor is None or torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputing_changes_no_bit(schedule, mode):
    """In training mode and in evaluation mode."""
    x, target = stateful_data(2 * MICROBATCHES)
    found = []
    for remat, segment in WAYS:
        spec = made(stateful_spec(microbatches=MICROBATCHES), segment)
        with Pipeline(spec, None, schedule=schedule, remat=remat) as pipe:
            found.append(bits(pipe.train(mode), (x,), target))
    assert_same_bits(*found)


def test_autocast_is_the_same_in_the_second_forward():
    """Casts of weights that a first forward has left behind lose no gradient."""
    inputs, target, _ = data_for("skip", 2 * MICROBATCHES)
    found = []
    for remat, segment in WAYS:
        spec = made(SPECS["skip"](microbatches=MICROBATCHES), segment)
        with Pipeline(spec, None, devices="cpu", remat=remat, precision="bf16") as pipe:
            found.append(bits(pipe, inputs, target))
    assert all(gradient.abs().sum() > 0 for gradient in found[1][1].values())
    assert_same_bits(*found)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batchnorm", list(BatchNorm))
def test_every_batchnorm_recomputes(batchnorm, workers):
    """Counters and running statistics included, whenever they change."""
    x, target = data(4 * MICROBATCHES)
    found = []
    for remat, segment in WAYS:
        spec = made(net_spec(microbatches=MICROBATCHES), segment)
        choices = {"remat": remat, "batchnorm": batchnorm}
        with Pipeline(spec, None, devices=["cpu"] * workers, **choices) as pipe:
            found.append(bits(pipe, (x,), target))
    assert_same_bits(*found)


class Masked(nn.Module):
    """Attention with a mask that is learned: fused kernels take it only without gradients."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.seen = []

    def forward(self, x):
        q = x[:, None, :, None].expand(-1, 2, -1, 8).contiguous()
        self.seen.append((torch.is_grad_enabled(), (q * self.bias[0, 0]).requires_grad))
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias * 1)

    def loss(self, y):
        return (y**2).sum()


def test_the_first_forward_computes_as_the_second():
    """Kernels choose their way by what needs a gradient, so both forwards must look the same."""
    stage = StageSpec(Masked, ("x",), ("y",), states(Masked), ("y",))
    loss = LossSpec("loss", (LossTerm(Reduction.SUM),), separate=True)
    found = []
    for remat, segment in WAYS:
        spec = made(spec_of([stage], [], [X], Leaf("y"), loss), segment)
        with Pipeline(spec, None, remat=remat) as pipe:
            found.append(bits(pipe, data_for("norm", 8)[0], steps=1))
            assert set(pipe.stages[0].seen) == {(True, True)}
    assert_same_bits(*found)


def most_living(remat, schedule, stages, microbatches):
    x, target, _ = (*data_for("skip", 2 * microbatches)[0], *data_for("skip", 2 * microbatches)[1:])
    spec = tanh_spec(stages, microbatches=microbatches)
    with Pipeline(spec, None, devices="cpu", schedule=schedule, remat=remat) as pipe:
        living = Living(2)
        with living:
            pipe.step((x,), target)
        return living.most, [stage.forwards for stage in pipe.stages.values()]


def test_only_what_was_received_is_kept():
    """Each micro-batch more costs its boundary value with remat, all its activations without.

    One stage keeps 16 values of a micro-batch (8 products, 8 tanhs), two keep 32 and one boundary
    value between them; inputs are views of the caller's tensor.
    """
    most = {
        (remat, stages, m): most_living(remat, "gpipe", stages, m)[0]
        for remat in (Remat.NONE, Remat.FULL)
        for stages in (1, 2)
        for m in (4, 6)
    }
    for stages, boundaries in ((1, 0), (2, 1)):
        without = most[Remat.NONE, stages, 6] - most[Remat.NONE, stages, 4]
        assert without >= 2 * 8 * stages
        assert most[Remat.FULL, stages, 6] - most[Remat.FULL, stages, 4] == 2 * boundaries
        assert most[Remat.FULL, stages, 4] < 2 * 8 * stages + 16
    assert most[Remat.NONE, 1, 4] > 4 * 8


@pytest.mark.parametrize(("remat", "extra"), [(Remat.NONE, 0), (Remat.FULL, 3)])
def test_the_last_microbatch_is_not_computed_again(remat, extra):
    """Under GPipe; under 1F1B on the last device nothing is."""
    assert most_living(remat, "gpipe", 2, 4)[1] == [4 + extra] * 2
    assert most_living(remat, "1f1b", 2, 4)[1] == [4, 4]


def test_what_trains_nothing_is_not_computed_again():
    """Neither does it keep its arguments."""
    x, target = stateful_data(2 * MICROBATCHES)
    spec = stateful_spec(microbatches=MICROBATCHES)
    calls = dict.fromkeys(range(4), 0)
    with Pipeline(spec, None, remat="full") as pipe:
        for index, stage in pipe.stages.items():

            def count(*_, index=index):
                calls[index] += 1

            stage.register_forward_pre_hook(count)
        pipe.step((x,), target)
    again = 2 * MICROBATCHES - 1
    assert calls == {0: MICROBATCHES, 1: again, 2: again, 3: again}


class Overwrites(nn.Module):
    """Counts in its argument, which autograd does not mind."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x.add_(1) * self.w

    def loss(self, y):
        return y.sum()


def test_a_stage_that_writes_to_its_argument_is_refused():
    """Its second forward would start from another value."""
    stage = StageSpec(Overwrites, ("x",), ("y",), states(Overwrites), ("y",))
    spec = spec_of([stage], [], [X], Leaf("y"), LossSpec("loss", (LossTerm(Reduction.SUM),), True))
    x = data_for("norm", 8)[0]
    with Pipeline(spec, None, microbatches=1, remat="full") as pipe:
        pipe.step(x.clone())
    with (
        Pipeline(spec, None, remat="full") as pipe,
        pytest.raises(StageError, match=r"0F0.*writes to a value it received"),
    ):
        pipe.step(x.clone())


def raise_after_writing(module):
    module.also.zero_()
    raise ValueError


def test_stand_ins_for_buffers():
    """Names of one tensor stay one; what is written goes where it should."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Averaged()
            self.register_buffer("also", self.inner.average)
            self.register_buffer("none", None)

    module = Held()
    average = module.inner.average
    written = WrittenBuffers(module, ("inner.average", "also", "none", "unknown"))
    copies = written.copies()
    assert copies[0] is copies[1]
    with written.replaced(copies):
        assert module.inner.average is module.also is copies[0] is not average
        module.also.zero_()
    assert module.inner.average is module.also is average
    assert torch.equal(average, torch.ones(WIDTH, dtype=F64))
    with written.apart():
        assert module.also is not average
        module.inner.average.mul_(3)
    assert module.also is average
    assert torch.equal(average, torch.full((WIDTH,), 3.0, dtype=F64))
    with contextlib.suppress(ValueError), written.apart():
        raise_after_writing(module)
    assert module.inner.average is module.also is average
    assert torch.equal(average, torch.full((WIDTH,), 3.0, dtype=F64))


def test_tied_parameters_train_alike():
    """The two owners of the shared matrix hold the same bits after recomputed steps."""
    x, target = stateful_data(2 * MICROBATCHES)
    spec = stateful_spec(microbatches=MICROBATCHES)
    with Pipeline(spec, None, remat="full") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step((x,), target)
        optimizer.step()
        pipe.step((x,), target)
        owners = [s for s in pipe.stages.values() if isinstance(s, Averaged | Head)]
        assert torch.equal(owners[0].shared, owners[1].head)
