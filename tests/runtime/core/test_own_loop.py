"""Loops that change what is trained between steps, against plain PyTorch on whole batches."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import forked
import pytest
import torch
from loop_ranks import Plain, run, spec
from tiny_pipelines import data_for, skip_spec
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import parametrize, prune

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import StageError, UsageError

SCRIPT = Path(__file__).parents[1] / "loop_ranks.py"


@pytest.mark.parametrize(
    ("ranks", "schedule", "replicas"),
    [(0, "1f1b", 1), (0, "zb-h1", 1), (2, "gpipe", 1), (2, "gpipe", 2)],
)
def test_what_is_trained_changes_from_step_to_step(tmp_path, ranks, schedule, replicas):
    """Frozen stages and a frozen tied matrix are trained later, and others no more; weights are
    assigned; hooks clamp the gradients of mini-batches, and update weights within the backward.
    """
    done = forked.run([SCRIPT, tmp_path, schedule, replicas], ranks=ranks)
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(max(1, ranks))]
    plain = Plain()
    plain.load_state_dict(found[0][0])
    for step, expected in enumerate(run(plain)):
        seen = {}
        for _, steps in reversed(found):
            seen.update(steps[step])
        assert seen.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                seen[name], tensor, msg=lambda m, n=name, s=step: f"{n} {s}: {m}"
            )


def test_a_hook_takes_what_a_loss_is_scaled_by():
    """Where `backward()` comes later: one hook, of the gradient of the scaled loss."""
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        pipe.step(inputs, target, weight=0.5)
        weight = dict(pipe.named_parameters())["model.l1.weight"]
        expected = weight.grad.clone()
        pipe.zero_grad()
        seen = []
        weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        loss = pipe.loss(inputs, target)
        assert not seen
        (0.5 * loss).backward()
        torch.testing.assert_close(seen, [expected])
        torch.testing.assert_close(weight.grad, expected)


def test_a_loss_gives_gradients_to_whoever_asks_autograd():
    """To `torch.autograd.grad`, and to a backward that is to reach some parameters alone."""
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        parameters = [p for p in pipe.parameters() if p.requires_grad]
        pipe.step(inputs, target)
        expected = [parameter.grad.clone() for parameter in parameters]
        pipe.zero_grad()
        found = torch.autograd.grad(2 * pipe.loss(inputs, target), parameters)
        torch.testing.assert_close(found, tuple(2 * gradient for gradient in expected))
        assert all(parameter.grad is None for parameter in parameters)
        first, *others = parameters
        pipe.loss(inputs, target).backward(inputs=[first])
        torch.testing.assert_close(first.grad, expected[0])
        assert all(parameter.grad is None for parameter in others)


def test_what_failed_leaves_gradients_and_hooks_as_they_were():
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        pipe.step(inputs, target)
        weight = dict(pipe.named_parameters())["model.l1.weight"]
        before, seen = weight.grad.clone(), []
        weight.register_hook(lambda gradient: seen.append(1))
        with pytest.raises(StageError):
            pipe.step((inputs[0].double(),), target)
        assert torch.equal(weight.grad, before)
        assert not seen
        pipe.step(inputs, target)
        assert seen == [1]


CHANGES = {
    "assigned": lambda part: setattr(part, "weight", nn.Parameter(torch.zeros(6, 6))),
    "pruned": lambda part: prune.random_unstructured(part, "weight", 0.5),
    "parametrised": lambda part: parametrize.register_parametrization(part, "weight", nn.ReLU()),
    "weight_norm": nn.utils.weight_norm,
    "in eval mode": nn.Module.eval,
    "hooked": lambda part: part.register_forward_hook(lambda *_: None),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_refuses_what_no_stage_would_know(change):
    with Pipeline(skip_spec(), None) as pipe:
        with pytest.raises(UsageError, match="would be without effect") as caught:
            CHANGES[change](pipe.get_submodule("model.l1"))
        assert "copy_" in caught.value.hint


def test_other_tensors_in_the_place_of_weights_are_refused():
    inputs, _, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        doubled = {name: 2 * p for name, p in pipe.named_parameters()}
        with pytest.raises(UsageError, match="would be without effect"):
            torch.func.functional_call(pipe, doubled, (inputs,))
        pipe(inputs)


TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_a_call_are_refused(transform):
    """Their derivatives would be zeros."""
    (x,), _, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        with pytest.raises(UsageError, match="do not reach its stages"):
            TRANSFORMS[transform](lambda x: pipe(x)["y"], x)
        with (
            pytest.raises(UsageError, match="do not reach"),
            torch.autograd.forward_ad.dual_level(),
        ):
            pipe(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.slow
def test_a_call_in_a_compiled_function_is_refused():
    inputs, _, _ = data_for("skip", 8)
    with Pipeline(skip_spec(), None) as pipe:
        for call in (
            torch.compile(pipe, backend="eager"),
            torch.compile(pipe.step, backend="eager"),
        ):
            with pytest.raises(UsageError, match=r"torch\.compile cannot follow") as caught:
                call(inputs)
            assert "compile_blocks=True" in caught.value.hint


def test_a_pipeline_is_not_pickled():
    with Pipeline(skip_spec(), None) as pipe, pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(pipe)


def test_of_several_names_the_first_of_the_model_counts():
    """Also where a stage has the other module first: its gradient is clipped with the rest."""
    named = dataclasses.replace(skip_spec(), aliases={"model.l0.tied": "model.l1.weight"})
    inputs, target, _ = data_for("skip", 8)
    with Pipeline(named, None) as pipe:
        names = [name for name, _ in pipe.named_parameters()]
        assert "model.l1.weight" in names
        assert "model.l0.tied" not in names
        pipe.step(inputs, target)
        gradients = [parameter.grad for parameter in pipe.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.testing.assert_close(pipe.clip_grad_norm_(1e-3), norm)


def test_what_an_optimizer_of_the_plain_model_remembers_is_taken_by_names():
    """Parameters lie in the order of stages, and not in that of the model."""
    plain = Plain().requires_grad_()
    own = torch.optim.AdamW(plain.parameters(), lr=0.1)
    x, target = torch.randn(2, 8, 6)
    plain.step((x,), target)
    own.step()
    with Pipeline(spec(), None) as pipe:
        pipe.requires_grad_()
        pipe.load_state_dict(plain.state_dict())
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        state = copy.deepcopy(get_optimizer_state_dict(plain, own))
        set_optimizer_state_dict(pipe, optimizer, state)
        for model, each in ((plain, own), (pipe, optimizer)):
            each.zero_grad()
            model.step((x,), target)
            each.step()
        expected = dict(plain.named_parameters())
        assert list(expected) != [name for name, _ in pipe.named_parameters()]
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, expected[name])


def test_loading_says_what_is_missing_and_unknown():
    """As torch's modules do, where that is accepted."""
    with Pipeline(skip_spec(), None) as pipe:
        state = pipe.state_dict()
        state["other"] = state.pop("model.l1.bias")
        found = pipe.load_state_dict(state, strict=False)
        assert found.missing_keys == ["model.l1.bias"]
        assert found.unexpected_keys == ["other"]
        assert not any(pipe.load_state_dict(pipe.state_dict()))
