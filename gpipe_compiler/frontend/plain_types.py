"""Tensors without numbers that are of the type that a model meets when it runs."""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from gpipe_compiler.frontend.locate import is_installed_file, is_users


class _Asked(type):
    """What `type` is but for what it says of a fake tensor."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and builtins.type(args[0]) is FakeTensor:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return builtins.type(*args, **kwargs)

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, builtins.type)

    def __subclasscheck__(cls, item: type) -> bool:
        return issubclass(item, builtins.type)

    def __getitem__(cls, item: Any) -> Any:
        return builtins.type[item]


class _Type(type, metaclass=_Asked):
    """In the place of `type`."""


@contextlib.contextmanager
def plain_types(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lets what asks for the type of a fake tensor be told that of a tensor with numbers.

    Args:
        modules: whose own code may ask, beside the user's files.
    """
    asking = {id(names): names for names in _names_of(modules) if "type" not in names}
    try:
        for names in asking.values():
            names["type"] = _Type
        yield
    finally:
        for names in asking.values():
            del names["type"]


def _names_of(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """The global names of the code of modules, and of all that is in no installed library."""
    for cls in {cls for module in modules for cls in type(module).__mro__}:
        for function in vars(cls).values():
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                yield function.__globals__
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_users(file) and not is_installed_file(file):
            yield vars(module)
