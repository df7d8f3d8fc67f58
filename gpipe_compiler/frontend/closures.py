"""Functions that a copied model holds, bound to the copy.

`copy.deepcopy` copies modules, and takes functions as they are: a hook that captured its module,
or a tensor or dict beside it, acts on the model that was copied.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn


def rebind(model: nn.Module, memo: dict[int, Any]) -> None:
    """Lets the functions that a copy holds capture what belongs to the copy.

    Args:
        memo: of the `copy.deepcopy` that made the copy.
    """
    binding = _Binding(memo)
    for module in list(model.modules()):
        for name, item in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                bound = binding.of(item)
                if bound is not item:
                    vars(module)[name] = bound


@dataclass(frozen=True)
class _Binding:
    """What stands in the copy for what the functions of the original captured.

    Attributes:
        done: by the identity of functions, theirs.
    """

    memo: dict[int, Any]
    done: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def of(self, item: Any) -> Any:
        """The item with the functions in it bound anew: itself where there are none."""
        match item:
            case FunctionType():
                return self._function(item)
            case functools.partial():
                function, keywords = self.of(item.func), self.of(dict(item.keywords))
                return type(item)(function, *map(self.of, item.args), **keywords)
            case dict():
                for key, part in list(item.items()):
                    bound = self.of(part)
                    if bound is not part:
                        item[key] = bound
            case list():
                item[:] = map(self.of, item)
            case tuple() if type(item) is tuple:
                return tuple(map(self.of, item))
        return item

    def _function(self, function: FunctionType) -> Callable[..., Any]:
        known = self.done.get(id(function))
        if known is not None:
            return known
        cells = function.__closure__ or ()
        held = [*map(_content, cells), *(function.__defaults__ or ())]
        held.extend((function.__kwdefaults__ or {}).values())
        self.done[id(function)] = function
        if not any(map(self._concerns, held)):
            return function
        own = tuple(CellType() for _ in cells)
        bound = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, own or None
        )
        functools.update_wrapper(bound, function, updated=("__dict__",))
        vars(bound).pop("__wrapped__", None)
        vars(bound).update(vars(function))
        self.done[id(function)] = bound
        for cell, old in zip(own, cells, strict=True):
            content = _content(old)
            if content is not _EMPTY:
                cell.cell_contents = self._captured(content)
        if function.__defaults__ is not None:
            bound.__defaults__ = tuple(map(self._captured, function.__defaults__))
        if function.__kwdefaults__ is not None:
            defaults = function.__kwdefaults__.items()
            bound.__kwdefaults__ = {key: self._captured(item) for key, item in defaults}
        return bound

    def _concerns(self, item: Any) -> bool:
        """Whether something captured may belong to the model, or change when it runs."""
        match item:
            case FunctionType():
                return self._function(item) is not item
            case nn.Module():
                return id(item) in self.memo
            case functools.partial():
                return any(map(self._concerns, (item.func, *item.args, *item.keywords.values())))
            case tuple():
                return any(map(self._concerns, item))
            case MethodType():
                return id(item.__self__) in self.memo
        return isinstance(item, torch.Tensor | dict | list | set)

    def _captured(self, item: Any) -> Any:
        if not self._concerns(item):
            return item
        if isinstance(item, FunctionType):
            return self._function(item)
        try:
            return self.of(copy.deepcopy(item, self.memo))
        except Exception:  # what cannot be copied stays as it is, as functions themselves do
            return item


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return _EMPTY
