"""SyncBatchNorm becomes BatchNorm: in a pipeline, other processes have other layers to compute.

It asks every process of the job for its statistics, on a GPU at least, and would wait for ever for
those that hold other stages. By itself in one process it is BatchNorm, and so that is what is
traced; `--batchnorm` says what it normalises over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_BY_DIMENSIONS: Mapping[int, type[nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}


@contextlib.contextmanager
def turned_into_batchnorm(model: nn.Module) -> Iterator[None]:
    """While copies of the model run, notes what its SyncBatchNorms are given; then turns them.

    A layer that is never called, or on inputs of several kinds, stays; see `modules.is_plain`.
    """
    layers: dict[str, nn.Module] = {
        path: module for path, module in model.named_modules() if type(module) is nn.SyncBatchNorm
    }
    seen = {path: _Kinds() for path in layers}
    hooks = [module.register_forward_pre_hook(seen[path]) for path, module in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for path, module in layers.items():
        if len(seen[path].kinds) == 1:
            (module.__class__,) = seen[path].kinds
            del module.process_group


class _Kinds:
    """A hook that notes which BatchNorm takes what a layer is given; copies of it note it too."""

    def __init__(self) -> None:
        self.kinds: set[type[nn.Module]] = set()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].ndim in _BY_DIMENSIONS:
            self.kinds.add(_BY_DIMENSIONS[args[0].ndim])

    def __deepcopy__(self, memo: object) -> _Kinds:
        return self
