"""Python state that forward changes, such as a counter of calls: a trace holds one value of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare

PythonState: TypeAlias = Mapping[tuple[str, str], object]
"""By module and attribute: numbers and words, sizes of containers, which tensor."""

_FAR = 1_000_003
"""Calls after which a counter is looked at."""

_OWN = frozenset(vars(nn.Module()))


def python_state(model: nn.Module) -> PythonState:
    """What the attributes of a model's modules are at the moment, parameters and buffers apart."""
    return {
        (path, name): _seen(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN
    }


def _seen(value: object) -> object:
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | dict | set | deque):
        return type(value), len(value)
    return id(value) if isinstance(value, torch.Tensor) else type(value)


def changed(before: PythonState, after: PythonState) -> list[tuple[str, str]]:
    """The attributes that are not what they were."""
    return [key for key, value in after.items() if value != before.get(key, None)]


def refuse_remembered(model: nn.Module, call: Callable[[float], Sequence[Any]]) -> None:
    """Makes sure that further calls give what the first one gives, parameters and buffers alike.

    Args:
        model: that is called; no call may have been made.
        call: gives what the model returns for the example, its floats times a number, by the same
            random numbers.

    Raises:
        ModelError: naming the attribute that decides.
    """
    held = [*model.parameters(), *model.buffers()]
    tensors = [(tensor, tensor.detach().clone()) for tensor in held]

    def again(times: float = 1.0) -> Mapping[str, torch.Tensor]:
        with torch.no_grad():
            for tensor, content in tensors:
                tensor.copy_(content)
        leaves = enumerate(call(times))
        return {str(n): x.detach().clone() for n, x in leaves if isinstance(x, torch.Tensor)}

    states = [python_state(model)]
    try:
        first = again()
        states.append(python_state(model))
        again(times=2.0)
        states.append(python_state(model))
        later = again()
        counters = [key for key in states[2] if _counts([state.get(key) for state in states])]
        if _alike(first, later) and counters:
            for path, name in counters:
                setattr(model.get_submodule(path), name, states[2][path, name] + _FAR)  # type: ignore[operator]  # an integer
            later = again()
    except Exception:  # noqa: BLE001  # whatever the user's code raises: nothing is told
        return
    if not _alike(first, later):
        keys = counters or changed(states[1], states[2]) or changed(states[0], states[1])
        raise _remembers(model, keys, states)


def _counts(values: Sequence[object]) -> bool:
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return False
    first, second, third = numbers
    return third - second == second - first != 0


def _alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    if one.keys() != other.keys() or any(one[n].shape != other[n].shape for n in one):
        return False
    return all(
        row.passed for row in compare({ComparedKind.OUTPUT: other}, {ComparedKind.OUTPUT: one})
    )


def _remembers(
    model: nn.Module, keys: Sequence[tuple[str, str]], states: Sequence[PythonState]
) -> ModelError:
    path, name = keys[0] if keys else ("", "")
    attribute = ".".join(filter(None, ("self", path, name)))
    what = f"{attribute}, which forward changes," if keys else "something that forward changes"
    return ModelError(
        f"another call of the model on the same batch gives another result: {what} decides what "
        "it computes, and a stage has one value of it",
        location=definition(type(model.get_submodule(path)).forward),
        hint="keep it in a buffer (register_buffer) that forward writes in place, or set it "
        "outside of forward",
    )
