"""The tensors in nests of arguments and results of calls."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpipe_compiler.ir.arguments import tensors_in

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
