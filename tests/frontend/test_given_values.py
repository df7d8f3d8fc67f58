"""Values of Python's that a graph holds: what the loss uses of a target, and what it does not."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.examples import given_values
from gpipe_compiler.frontend.subject import Subject


def compared(output: Tensor, target: dict) -> Tensor:
    return F.mse_loss(output, target["y"]) * (2 if target["used"] == "twice" else 1)


def asked(output: Tensor, target: dict) -> Tensor:
    return F.mse_loss(output, target["y"]) * (2 if target["used"] else 1)


def of_a_type(output: Tensor, target: dict) -> Tensor:
    return F.mse_loss(output, target["y"]) * (2 if isinstance(target["used"], str) else 1)


def computed_with(output: Tensor, target: dict) -> Tensor:
    return F.mse_loss(output, target["y"]) * target["used"]


def formatted(output: Tensor, target: dict) -> Tensor:
    return F.mse_loss(output, target[f"{target['used']}"])


def subject_of(loss: object, used: object, **more: object) -> Subject:
    target = {"y": torch.ones(4, 2), "used": used, **more}
    return Subject("net", nn.Linear(3, 2), (torch.ones(4, 3),), target=target, loss_fn=loss)


@pytest.mark.parametrize(
    ("loss", "used"),
    [(compared, "twice"), (asked, True), (of_a_type, "a"), (computed_with, 2.0), (formatted, "y")],
)
def test_what_the_loss_uses_is_held(loss: object, used: object) -> None:
    given = given_values(subject_of(loss, used, file="a.png", lock=threading.Lock()))

    assert [(value.path, value.text) for value in given] == [(("target", "used"), repr(used))]


def test_what_is_used_and_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ModelError, match="the target holds an object that no later call's"):
        given_values(subject_of(asked, threading.Lock()))


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_the_example_stays_as_it_is() -> None:
    x = torch.ones(4, 2)
    target = {"y": torch.ones(4, 2), "used": 2.0}

    given_values(Subject("net", Doubles(), (x,), target=target, loss_fn=computed_with))

    assert torch.equal(x, torch.ones(4, 2))


@pytest.mark.parametrize("default", [torch.ones(2), [1.0, 2.0], "a"])
def test_defaults_of_any_kind_are_looked_at_alone(default: object) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, scale: object = default) -> Tensor:
            return x

    given = given_values(Subject("net", Net(), (torch.ones(1),), training=False))

    assert [value.path for value in given] == [("kwargs", "scale")]
