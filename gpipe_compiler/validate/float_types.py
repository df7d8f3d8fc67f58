"""The 16-bit types that a model computes in by itself; tensors and models in other types."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.ir import Autocast, Graph, RegionCall, ops_within
from gpipe_compiler.runtime.train.comparison import Tensors

_LOWER = frozenset({torch.bfloat16, torch.float16})


def lower_types(graph: Graph) -> frozenset[torch.dtype]:
    """Those of its values, parameters and buffers, and those of its autocast regions."""
    held = {item.dtype for items in (graph.values, graph.state) for item in items.values()}
    return frozenset(_LOWER & {*held, *_of_regions(graph)})


def _of_regions(graph: Graph) -> Iterator[torch.dtype]:
    for op in itertools.chain.from_iterable(map(ops_within, graph.ops)):
        context = op.call.context if isinstance(op.call, RegionCall) else None
        if isinstance(context, Autocast) and context.enabled:
            yield context.dtype or torch.get_autocast_dtype(context.device_type)


@contextlib.contextmanager
def without_lower() -> Iterator[None]:
    """Around a model in 64 bits: what it casts to 16 bits stays in 64, and autocast is off."""
    with torch._C._DisableAutocast(), _Widened():  # type: ignore[no-untyped-call]  # torch's own base
        yield


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base
    """Every op that is to make 16 bits makes 64."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What the op returns."""
        wide, named = tree_map(_widened, (tuple(args), kwargs or {}))
        return func(*wide, **named)


def _widened(argument: Any) -> Any:
    is_lower = isinstance(argument, torch.dtype) and argument in _LOWER
    return torch.float64 if is_lower else argument


def rounded(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Tensors of every kind, in a type that is rounded to where there is one."""
    return {
        kind: {name: to_type(tensor, dtype) for name, tensor in group.items()}
        for kind, group in tensors.items()
    }


def to_type(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """In a type that is rounded to, where there is one and the tensor has fractions."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Floats in 64 bits; anything else as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor


def doubled(function: Any) -> Any:
    """A module with its tensors in 64 bits; any other function as it is."""
    if not isinstance(function, nn.Module):
        return function
    return isolated(function, share_parameters=False).double()
