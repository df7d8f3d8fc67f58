"""The tensors in nests of arguments and results of calls."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.ir.symbolic import same_shape

_LITERAL_ELEMENTS = 16
"""A constant of at most this many elements is written where it is used."""


def has_tensors(item: Any) -> bool:
    """Whether there is a tensor in a nest."""
    return bool(tensors_in(item))


def is_literal(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be written out, exactly."""
    return (
        tensor.numel() <= _LITERAL_ELEMENTS
        and not tensor.is_complex()
        and bool(torch.isfinite(tensor).all())
    )


def numbered(index: Any) -> Any:
    """What stands in brackets, numbers in place of the tensors in slices and known integers."""
    match index:
        case tuple():
            return tuple(map(numbered, index))
        case list():
            return list(map(numbered, index))
        case slice(start=start, stop=stop, step=step):
            bounds = (start, stop, step)
            return slice(*(operator.index(b) if isinstance(b, FakeTensor) else b for b in bounds))
        case FakeTensor(constant=torch.Tensor() as known) if known.dtype is torch.int64:
            return int(known)
        case np.generic():
            return index.item()
    return index


def widened(index: Any) -> tuple[Any, int] | None:
    """What stands in brackets with a row of one number in place of a tensor that is a number, which
    torch reads; and the dimension of that row in what is taken. None where there is none, or more.
    """
    items = index if isinstance(index, tuple) else (index,)
    numbers = [place for place, item in enumerate(items) if _is_number(item)]
    if len(numbers) != 1 or any(map(_is_advanced, items)):
        return None
    place = numbers[0]
    if any(item is Ellipsis for item in items[:place]):
        return None
    dim = sum(item is None or isinstance(item, slice) for item in items[:place])
    return (*items[:place], items[place].unsqueeze(0), *items[place + 1 :]), dim


def at_number(name: str, index: Any, dim: int, tensor: torch.Tensor, *value: Any) -> Any:
    """What stands in brackets, of a place that a tensor says: torch would read its number."""
    if name == "__getitem__":
        return tensor[index].select(dim, 0)
    (given,) = value
    has_row = isinstance(given, torch.Tensor) and given.dim() > 0
    return tensor.__setitem__(index, given.unsqueeze(dim) if has_row and dim else given)


def _is_number(item: object) -> bool:
    wholes = (torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in wholes


def _is_advanced(item: object) -> bool:
    """Whether something in brackets is more than one place or a stretch of them."""
    return isinstance(item, list) or (isinstance(item, torch.Tensor) and not _is_number(item))


# --- functions that are recorded by what they come to ---------------------------------------------


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
