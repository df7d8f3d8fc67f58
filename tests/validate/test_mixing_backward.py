"""Backwards of a model's own are tried as the graph calls them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_compiler.ir.own_functions import WrittenClass, own_function
from gpipe_compiler.validate.mixing_backward import function_that_mixes
from gpipe_compiler.validate.some_samples import PARTS, SAMPLES


@torch.library.custom_op("tests_mixing_backward::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x.clone()


def centre(_: object, gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0, keepdim=True)


centred.register_autograd(centre)
operator = torch.ops.tests_mixing_backward.centred.default


class WithOperator(torch.autograd.Function):
    """Calls an operator whose backward is not its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return operator(x) * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_an_operator_whose_backward_takes_samples_together_is_found() -> None:
    x = torch.randn(SAMPLES, 3)
    found = function_that_mixes(lambda rows: operator(x[list(rows)]), SAMPLES, PARTS)
    assert found is not None
    assert found.function is operator


def test_a_function_that_calls_it_goes_back_by_its_own() -> None:
    x, function = torch.randn(SAMPLES, 3), own_function(WithOperator, WrittenClass("a.module"))
    assert function_that_mixes(lambda rows: function(x[list(rows)]), SAMPLES, PARTS) is None
