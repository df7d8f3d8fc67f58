"""Averages of a pipeline's weights, and losses with a `backward()`, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from averaged_ranks import plain_run
from tiny_pipelines import data_for, skip_spec
from torch.optim.swa_utils import AveragedModel

from gpipe_compiler.runtime.core.nest import tensors_of
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import UsageError

SCRIPT = Path(__file__).parents[1] / "averaged_ranks.py"


@pytest.mark.parametrize("ranks", [0, 2])
def test_averages_are_those_of_the_plain_model(tmp_path, ranks):
    """EMA with buffers, a mean, and timm's where it is installed, over 20 steps of `loss`.

    With weights tied over stages, BatchNorm, and submodules called as attributes of a pipeline.
    """
    done = forked.run([SCRIPT, "average", tmp_path / "found.pt"], ranks=ranks)
    assert done.returncode == 0, done.stderr
    start, found = torch.load(tmp_path / "found.pt")
    expected = plain_run(start)
    assert found.keys() == expected.keys()
    for kind, state in expected.items():
        assert found[kind].keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found[kind][name], tensor, rtol=1e-9, atol=1e-9)


def test_a_copy_has_weights_and_threads_of_its_own():
    """It infers with them after the pipeline has trained on, and after that is closed."""
    pipe = Pipeline(skip_spec(), None)
    inputs, target, _ = data_for("skip", 8)
    average = AveragedModel(pipe).eval()
    before = dict(tensors_of(average(inputs)))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    pipe.step(inputs, target)
    optimizer.step()
    pipe.close()
    assert pipe.training
    assert not average.module.training
    after = dict(tensors_of(average(inputs)))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(p.grad is None for p in average.parameters())
    average.module.close()


def test_a_state_of_an_average_is_loaded_again():
    with Pipeline(skip_spec(), None) as pipe, Pipeline(skip_spec(), None, seed=1) as other:
        inputs, target, _ = data_for("skip", 8)
        average = AveragedModel(pipe)
        loss = other.evaluate(inputs, target)
        AveragedModel(other).load_state_dict(average.state_dict())
        assert torch.equal(other.evaluate(inputs, target), loss)
        average.load_state_dict(AveragedModel(other).state_dict())
        assert torch.equal(average.module.evaluate(inputs, target), loss)


def test_a_loss_is_a_step_whose_gradients_come_later():
    """Scaled, added up with those that are there, and none without `backward()`."""
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        pipe.step(inputs, target, weight=0.25)
        pipe.step(inputs, target, weight=0.5)
        expected = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        pipe.zero_grad()
        first = pipe.loss(inputs, target)
        assert all(p.grad is None for p in pipe.parameters())
        (0.25 * first).backward()
        second = pipe.loss(inputs, target)
        assert torch.equal(second, first)
        (0.5 * second).backward()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])
        with torch.no_grad():
            assert not pipe.loss(inputs, target).requires_grad
        with pytest.raises(UsageError, match="once"):
            second.backward()


def test_losses_of_replicas_accumulate_as_steps_do(tmp_path):
    """Within `no_sync`, as loops of others call it, and to the bit in both replicas."""
    done = forked.run([SCRIPT, "accumulate", tmp_path / "x"], ranks=4)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(file) for file in sorted(tmp_path.glob("*.pt"))]
    assert len(ranks) == 4
    for by_loss, by_step in ranks:
        assert by_loss
        for name, gradient in by_step.items():
            torch.testing.assert_close(by_loss[name], gradient)
    for rank in range(2):
        for name, gradient in ranks[rank][0].items():
            assert torch.equal(ranks[rank + 2][0][name], gradient)


def test_a_loss_refuses_what_it_does_not_do():
    (x,), target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        with pytest.raises(UsageError, match="x requires a gradient"):
            pipe.loss((x.clone().requires_grad_(),), target)
        pipe.loss((x,), target)
    with (
        Pipeline(skip_spec(), None, precision="fp16") as pipe,
        pytest.raises(UsageError, match="fp16"),
    ):
        pipe.loss((x,), target)


def test_weights_stay_where_stages_compute():
    """What would change nothing is let through: training loops call it."""
    with Pipeline(skip_spec(), None) as pipe:
        assert pipe.to("cpu") is pipe
        assert AveragedModel(pipe, device="cpu").module.float().training
        with pytest.raises(UsageError, match=r"torch.float32 on cpu stay so"):
            pipe.half()
        with pytest.raises(UsageError, match="Pipeline"):
            torch.nn.Sequential(pipe).to("meta")
