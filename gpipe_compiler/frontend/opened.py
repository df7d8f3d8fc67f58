"""Functions of torch that are recorded by what they come to, as a trace cannot follow them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from gpipe_compiler.ir.symbolic import same_shape


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _allclose(
    input: torch.Tensor,  # noqa: A002  # named as torch's
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    return bool(torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


def _bincount(
    input: torch.Tensor,  # noqa: A002  # named as torch's
    weights: torch.Tensor | None = None,
    minlength: int = 0,
) -> torch.Tensor:
    """Of numbers below `minlength` there are so many counts; see `QuickFakes`."""
    if minlength and not bool((input < minlength).all()):
        minlength = 0
    return torch.ops.aten.bincount.default(input, weights, minlength)  # type: ignore[no-any-return]


_ASKING: Mapping[str, Callable[..., Any]] = {
    "equal": _equal,
    "allclose": _allclose,
    "is_nonzero": bool,
    "bincount": _bincount,
}
"""What looks at values, each with what asks by `bool` for the truth of one condition."""


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Lets a run with numbers ask for the conditions that a recorded one asks for.

    Like torch's own functions, what stands for them is called by C: else Python would name another
    instruction for the place of a call.
    """
    with contextlib.ExitStack() as around:
        for name, instead in _ASKING.items():
            around.enter_context(mock.patch.object(torch, name, functools.partial(instead)))
            method = functools.partialmethod(instead)
            around.enter_context(mock.patch.object(torch.Tensor, name, method))
        yield


def _take_along_dim(
    input: torch.Tensor,  # noqa: A002  # named as torch's
    indices: torch.Tensor,
    dim: int | None = None,
) -> torch.Tensor:
    """Torch's own compares the sizes as numbers."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    before, after = (slice(0, dim % input.ndim), slice(dim % input.ndim + 1, None))
    one, other = input.shape, indices.shape
    around = (*one[before], *one[after]), (*other[before], *other[after])
    if not same_shape(*around):
        wide = [b if isinstance(a, int) and a == 1 else a for a, b in zip(*around, strict=True)]
        input, indices = (  # noqa: A001  # named as torch's
            tensor.expand(*wide[before], tensor.shape[dim], *wide[before.stop :])
            for tensor in (input, indices)
        )
    return input.gather(dim, indices)


def _by_its_body(func: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that is no call for a mode, as those that it calls are."""
    names = {**func.__globals__, "has_torch_function_variadic": lambda *_: False}
    return types.FunctionType(func.__code__, names, func.__name__, func.__defaults__)


OPENED: Mapping[Any, Callable[..., Any]] = {
    **{
        getattr(home, name): instead
        for home in (torch, torch.Tensor)
        for name, instead in {**_ASKING, "take_along_dim": _take_along_dim}.items()
    },
    F.gaussian_nll_loss: _by_its_body(F.gaussian_nll_loss),
}
"""What each comes to."""
