"""What the judge does of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from adversary.case import Case
from adversary.judge import judge
from torch import Tensor, nn


class Alone(nn.Linear):
    """A pipeline of one stage: the model, in steps."""

    microbatches = 1

    def step_with_outputs(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = self(inputs)
        loss = endless(output, target)
        loss.backward()
        return loss.detach(), output.detach()

    def evaluate(self, inputs: Tensor, target: Tensor) -> Tensor:
        return endless(self(inputs), target).detach()


def endless(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is no number."""
    return (output - target).square().mean() * float("inf") * 0


@contextlib.contextmanager
def pipeline() -> Iterator[Alone]:
    yield Alone(3, 3)


@pytest.mark.parametrize("rounding", [True, False])
def test_losses_that_are_no_numbers_are_passed_over_where_no_case_is_about_them(
    rounding: bool,
) -> None:
    case = Case(
        "endless",
        lambda: nn.Linear(3, 3),
        lambda n: torch.randn(n, 3),
        endless,
        lambda n: torch.randn(n, 3),
        manners=({},),
        sizes=(4,),
        rounding=rounding,
    )

    verdict = judge(case, SimpleNamespace(Pipeline=pipeline), "whole")

    assert [what.rpartition(" ")[2] for what in verdict.passed] == ["train"] * rounding
    assert not verdict.faults
    assert verdict.compared
