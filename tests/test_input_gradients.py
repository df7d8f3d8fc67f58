"""Inputs that require gradients get those of plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import forked
import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.spec import BatchNorm, ScheduleKind

BATCH, WIDTH = 8, 6


class Skipping(nn.Module):
    """Its input goes to the first layer, which does not train, and to the last; a scale to all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.relu(self.first(x * scale))
        y = torch.tanh(self.middle(y)) * scale
        return self.last(self.norm(y) + x) * scale


def subject(name: str) -> Subject:
    torch.manual_seed(0)
    return Subject(
        name,
        Skipping(),
        (torch.randn(BATCH, WIDTH), torch.rand(WIDTH)),
        target=torch.randn(BATCH, WIDTH),
        loss_fn=F.mse_loss,
    )


def batch(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and target, all of which require gradients."""
    torch.manual_seed(1)
    x, scale, target = torch.randn(samples, WIDTH), torch.rand(WIDTH), torch.randn(samples, WIDTH)
    return x.requires_grad_(), scale.requires_grad_(), target.requires_grad_()


def expected(model: nn.Module, samples: int) -> list[Tensor]:
    x, scale, target = batch(samples)
    F.mse_loss(copy.deepcopy(model)(x, scale), target).backward()
    return [x.grad, scale.grad, target.grad]


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 3},
        {"stages": 3, "schedule": ScheduleKind.ZB_H1},
        {"stages": 1, "batchnorm": BatchNorm.EXACT},
    ],
)
def test_they_are_those_of_the_whole_batch(tmp_path: Path, options: dict[str, object]) -> None:
    given = subject("served")
    compile_subject(
        given, CompileOptions(microbatches=4, validate=False, **options), tmp_path / "out"
    )

    with load_package(tmp_path / "out").Pipeline() as pipe:
        for samples in (BATCH, 7):
            x, scale, target = batch(samples)
            pipe.step((x, scale), target)
            for actual, right in zip(
                (x, scale, target), expected(given.model, samples), strict=True
            ):
                torch.testing.assert_close(actual.grad, right)
        x, scale, target = (tensor.detach() for tensor in batch(BATCH))
        pipe.step((x, scale), target)
        assert x.grad is scale.grad is target.grad is None


def test_they_go_on_to_what_an_input_was_made_of(tmp_path: Path) -> None:
    given = subject("made")
    compile_subject(given, CompileOptions(2, 4, validate=False), tmp_path / "out")
    before = nn.Linear(WIDTH, WIDTH)
    raw, scale, target = (tensor.detach() for tensor in batch(BATCH))

    with load_package(tmp_path / "out").Pipeline() as pipe:
        pipe.step((before(raw), scale), target)

    actual, before.weight.grad = before.weight.grad, None
    F.mse_loss(copy.deepcopy(given.model)(before(raw), scale), target).backward()
    torch.testing.assert_close(actual, before.weight.grad)


_RANK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from out import Pipeline
with Pipeline() as pipe:
    x, scale, target = (tensor.requires_grad_() for tensor in torch.load(sys.argv[1] + "/in.pt"))
    pipe.step(*(((x, scale), target) if pipe.rank == 0 else ()))
    if pipe.rank == 0:
        torch.save([x.grad, scale.grad, target.grad], sys.argv[1] + "/found.pt")
"""


def test_of_several_ranks_rank_0_has_them(tmp_path: Path) -> None:
    given = subject("ranked")
    compile_subject(given, CompileOptions(2, 4, validate=False), tmp_path / "out")
    torch.save([tensor.detach() for tensor in batch(7)], tmp_path / "in.pt")
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    done = forked.run([script, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr

    found = torch.load(tmp_path / "found.pt")
    for actual, right in zip(found, expected(given.model, 7), strict=True):
        torch.testing.assert_close(actual, right)


class Switching(Skipping):
    """Turns its input's gradient on by itself, which only leaves can take."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x.requires_grad = True
        return super().forward(x, scale)


class Flooring(Skipping):
    """Has no gradient by its input at all: there is none of a floor division."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x // 0.5, scale)


@pytest.mark.parametrize("cls", [Switching, Flooring])
def test_models_that_take_no_gradients_of_inputs_train(tmp_path: Path, cls: type[Skipping]) -> None:
    given = dataclasses.replace(subject("plain"), model=cls())
    compile_subject(given, CompileOptions(2, 4, validate=False), tmp_path / "out")
    x, scale, target = (tensor.detach() for tensor in batch(7))
    plain = copy.deepcopy(given.model)
    F.mse_loss(plain(x.clone(), scale), target).backward()

    with load_package(tmp_path / "out").Pipeline() as pipe:
        pipe.step((x, scale), target)
        found = dict(pipe.named_parameters())

    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name].grad, parameter.grad)
