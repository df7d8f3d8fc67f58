"""Runs in 64 bits of what computes in fewer by its own casts."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpipe_compiler.dispatching import PlainDispatchMode


@contextlib.contextmanager
def widening(narrow: Collection[torch.dtype]) -> Iterator[None]:
    """Around a model in 64 bits: what it casts to these types stays in 64, and autocast is off."""
    with torch._C._DisableAutocast(), _Widened(narrow):
        yield


class _Widened(PlainDispatchMode):
    """Every op that is to make one of some types makes 64 bits."""

    def __init__(self, narrow: Collection[torch.dtype]) -> None:
        super().__init__()
        self._narrow = narrow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        wide, named = tree_map(self._widened, (tuple(args), kwargs or {}))
        return func(*wide, **named)

    def _widened(self, argument: Any) -> Any:
        is_narrow = isinstance(argument, torch.dtype) and argument in self._narrow
        return torch.float64 if is_narrow else argument
