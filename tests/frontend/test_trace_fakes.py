"""What a trace's fake tensors are by a rule is what torch makes of real ones."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from gpipe_compiler.frontend.trace_fakes import TraceFakes
from gpipe_compiler.frontend.without_numbers import _Named

SAMPLES = 6


def fakes(tensors):
    """The tensors without numbers; sizes of `SAMPLES` are one symbol."""
    environment = ShapeEnv()
    source = _Named("batch")
    symbol = environment.create_symbol(
        SAMPLES, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
    )
    size = environment.create_symintnode(symbol, hint=SAMPLES, source=source)

    def vary(numbers, tensor):
        return [
            n // SAMPLES * size if n % SAMPLES == 0 and SAMPLES in tensor.shape and n else n
            for n in numbers
        ]

    mode = TraceFakes(environment)
    with mode:
        made = [
            torch.empty_strided(vary(t.shape, t), vary(t.stride(), t), dtype=t.dtype)
            for t in tensors
        ]
    return mode, environment, made


def form(tensor):
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype


def samples(*shape, dtype=torch.float32):
    return torch.rand(SAMPLES, *shape).to(dtype)


RULED = {
    "relu": (torch.relu, [samples(4)]),
    "gelu": (F.gelu, [samples(4, 5)]),
    "in half": (torch.sigmoid, [samples(4, dtype=torch.float16)]),
    "by a number": (lambda x: x * 1.5, [samples(4)]),
    "to a power": (lambda x: x**2, [samples(4)]),
    "a sum": (torch.add, [samples(4), samples(4)]),
    "a vector added": (torch.add, [samples(4), torch.rand(4)]),
    "one row added": (torch.add, [samples(4), torch.rand(1, 4)]),
    "a number of no dimension": (torch.mul, [samples(4), torch.rand(())]),
    "a product": (torch.mm, [samples(4), torch.rand(4, 5)]),
    "of a matrix that is turned": (torch.mm, [samples(4), torch.rand(5, 4).t()]),
    "a turned one": (torch.t, [samples(4)]),
    "three dimensions turned": (lambda x: x.transpose(-1, 1), [samples(4, 5)]),
    "all of them": (lambda x: x.permute(2, 0, 1), [samples(4, 5)]),
    "detached": (torch.detach, [samples(4)[:, 1:]]),
    "a linear layer": (F.linear, [samples(4), torch.rand(5, 4), torch.rand(5)]),
}

LEFT_TO_TORCH = {
    "a batch that is turned": (torch.relu, [samples(4).t()]),
    "every other column": (torch.relu, [samples(8)[:, ::2]]),
    "channels last": (torch.relu, [samples(4, 3, 3).to(memory_format=torch.channels_last)]),
    "a wider one added": (torch.add, [torch.rand(4), samples(4)]),
    "two types": (torch.add, [samples(4), samples(4, dtype=torch.float64)]),
    "integers": (torch.mul, [samples(4).long(), 3]),
    "divided integers": (torch.div, [samples(4).long(), 3]),
    "by a complex number": (lambda x: x * 2j, [samples(4)]),
    "with a factor": (lambda x, y: torch.add(x, y, alpha=2), [samples(4), samples(4)]),
    "of three dimensions": (F.linear, [samples(3, 4), torch.rand(5, 4), torch.rand(5)]),
    "a column added": (torch.addmm, [samples(1), samples(4), torch.rand(4, 5)]),
}


def check(function, given):
    real = [item for item in given if isinstance(item, torch.Tensor)]
    expected = function(*given)
    mode, environment, made = fakes(real)
    rest = given[len(real) :]
    with enable_python_dispatcher(), mode:
        found = function(*made, *rest)
        asked = list(environment.guards)
        assert form(found) == form(expected)
        assert found.fake_device == expected.device
        assert found.fake_mode is mode
    return asked


@pytest.mark.parametrize("name", RULED)
def test_what_follows_from_the_operands_is_what_torch_makes_and_asks_for_nothing(name):
    assert not check(*RULED[name])


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_does_not_is_what_torch_makes_too(name):
    check(*LEFT_TO_TORCH[name])


def test_a_view_shares_the_memory_of_what_it_looks_into():
    mode, _, (made,) = fakes([samples(4)])

    with mode:
        view, other = made.t(), made.relu()

    assert view.untyped_storage()._cdata == made.untyped_storage()._cdata
    assert other.untyped_storage()._cdata != made.untyped_storage()._cdata


@pytest.mark.parametrize("function", [torch.mm, operator.add, lambda x, _: x.transpose(0, 2)])
def test_what_does_not_fit_raises_as_it_does_in_torch(function):
    mode, _, made = fakes([samples(4), torch.rand(5, 3)])

    with mode, pytest.raises((RuntimeError, IndexError)):
        function(*made)
