"""Carries calls of torch.autograd.Functions of the user's whole through a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_compiler.frontend.own_code import UnwritableError, written
from gpipe_compiler.ir.own_functions import OwnFunction, own_function


@contextlib.contextmanager
def own_functions_carried() -> Iterator[None]:
    """Lets what is traced inside hold `apply` of the user's functions as one operator each.

    Those that cannot be written into a package are traced through: as long as their backward is
    that of the ops of their forward, nothing is lost.
    """
    with mock.patch.object(_SingleLevelFunction, "apply", classmethod(_apply), create=True):
        yield


@contextlib.contextmanager
def own_functions_met() -> Iterator[list[type]]:
    """The functions of the user's that what runs inside is differentiated through.

    To look for them in the graph of autograd afterwards would end the process where that is deep:
    torch frees nodes that Python has seen within one another.
    """
    met: list[type] = []

    def apply(cls: Any, *args: Any) -> Any:
        made = super(_SingleLevelFunction, cls).apply(*args)
        leaves = (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        if not cls.__module__.startswith("torch.") and any(leaf.requires_grad for leaf in leaves):
            met.append(cls)
        return made

    with mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply), create=True):
        yield met


def _apply(cls: Any, *args: Any) -> Any:
    plain = super(_SingleLevelFunction, cls).apply
    mode = get_proxy_mode()
    if mode is None or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
        return plain(*args)
    carried = carried_function(cls)
    if carried is None:
        return plain(*args)
    tracer: Any = mode.tracer
    given = tree_map(tracer.unwrap_proxy, args)
    proxy = tracer.create_proxy("call_function", carried, given, {})
    with disable_proxy_modes_tracing():
        made = plain(*args)
    return track_tensor_tree(made, proxy, constant=None, tracer=tracer)


def carried_function(cls: type[torch.autograd.Function]) -> OwnFunction | None:
    """What stands for a function in a graph; None for one of torch's, or one with no source."""
    if cls.__module__.partition(".")[0] == "torch":
        return None
    try:
        found = written(cls)
    except UnwritableError:
        return None
    return own_function(cls, found)
