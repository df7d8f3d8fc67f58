"""Has comparisons of what a model counts come out one way, however the count stands.

A counter may let samples meet in a window of calls that nobody knows, as
`torch.where((n > 200) & (n < 300), ...)` does, or a flag that is set between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.passes.dry_run import tensors_in

_COMPARISONS = frozenset(
    {
        *("gt", "ge", "lt", "le", "eq", "ne"),
        *("__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal"),
    }
)


def force_gates(model: nn.Module, names: Collection[str], *, outcome: bool) -> None:
    """Changes a model, and so its copies: single numbers and flags among its state decide so.

    Args:
        outcome: of every comparison with such a number, or with what is computed of them.
    """
    for name, tensor in named_state(model):
        if name in names and tensor.dtype is torch.bool and tensor.numel() == 1:
            tensor.fill_(outcome)
    gates = _Gates(frozenset(names), outcome)
    # Methods of one object, which a copy of the model copies.
    model.register_forward_pre_hook(gates.begin)
    model.register_forward_hook(gates.end, always_call=True)


class _Gates:
    """Stands over every forward of a model."""

    def __init__(self, names: frozenset[str], outcome: bool) -> None:
        self._names = names
        self._outcome = outcome
        self._modes: list[_Forced] = []

    def begin(self, model: nn.Module, _: object) -> None:
        state = dict(named_state(model))
        deciding = [state[name] for name in self._names if name in state]
        mode = _Forced(state.values(), deciding, outcome=self._outcome)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._modes.append(mode)

    def end(self, *_: object) -> None:
        self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Forced(TorchFunctionMode):
    """Follows what is computed of a model's state alone.

    Args:
        deciding: those of them whose comparisons are forced.
    """

    def __init__(
        self, state: Iterable[torch.Tensor], deciding: Iterable[torch.Tensor], *, outcome: bool
    ) -> None:
        super().__init__()
        self._outcome = outcome
        # With the tensors, or others might have their ids.
        self._known = {id(tensor): tensor for tensor in state}
        self._deciding = {id(tensor): tensor for tensor in deciding}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, and replaces its result where it is such a comparison."""
        made = func(*args, **(kwargs or {}))
        given = tensors_in((args, dict(kwargs or {})))
        if any(id(tensor) not in self._known for tensor in given):
            return made
        decides = any(id(tensor) in self._deciding for tensor in given)
        if decides and getattr(func, "__name__", "") in _COMPARISONS and made.numel() == 1:
            made = torch.full_like(made, self._outcome)
        for tensor in tensors_in(made):
            self._known[id(tensor)] = tensor
            if decides:
                self._deciding[id(tensor)] = tensor
        return made
