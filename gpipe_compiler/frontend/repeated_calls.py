"""Whether further calls of a model give what its first one gives: a stage has one value of what
forward remembers.

Schedules may move on by little, or come to another way after thousands of calls. So calls are equal
to the bit where the model can repeat itself, and what moves on is put far ahead too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.python_state import (
    Place,
    PythonState,
    changed,
    places_of,
    python_state,
)
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare

_FAR = 1_000_003
"""Calls after which what moves on evenly is looked at."""

_MORE = 1000
"""Entries that a list gets then."""

_Run = Mapping[str, torch.Tensor]


class _Calls:
    """Calls of copies of a model.

    Attributes:
        places: where the copy keeps its state.
    """

    def __init__(
        self,
        fresh: Callable[[], nn.Module],
        loss_fn: object,
        call: Callable[[float], Sequence[Any]],
    ) -> None:
        self._fresh, self._loss_fn, self._call = fresh, loss_fn, call
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found: dict[str, Any] = {}
        self.places: Mapping[str, Place] = {}

    def begin(self, began: PythonState) -> None:
        """Takes a copy that was never called, and shared state as it was at first."""
        self._model = self._fresh()
        held = (*self._model.parameters(), *self._model.buffers())
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in held]
        self.places = places_of(self._model, self._loss_fn)
        self.put(began)

    def again(self, times: float = 1.0) -> _Run:
        """What a call gives, the floats of the example times a number."""
        with torch.no_grad():
            for tensor, content in self._tensors:
                tensor.copy_(content)
        leaves = enumerate(self._call(times))
        return {str(n): x.detach().clone() for n, x in leaves if isinstance(x, torch.Tensor)}

    def state(self) -> PythonState:
        return python_state(self._model, self._loss_fn)

    def ahead(
        self, moving: Sequence[str], before: PythonState, after: PythonState
    ) -> Iterator[_Run]:
        """What calls give when what moves on has moved far, where the model takes that."""
        places = places_of(self._model, self._loss_fn)
        for moved in (_by_far, _by_half):
            self.put({n: moved(places[n].value, before[n], after[n]) for n in moving})
            with contextlib.suppress(Exception):  # of a value that no call would come to
                yield self.again()

    def put(self, values: Mapping[str, Any]) -> None:
        for name in values.keys() & self.places.keys():
            self._found.setdefault(name, self.places[name].value)
            self.places[name].put(values[name])

    def leave(self) -> None:
        """Puts back what was found."""
        self.put(self._found)


def refuse_remembered(
    fresh: Callable[[], nn.Module],
    loss_fn: object,
    began: PythonState,
    call: Callable[[float], Sequence[Any]],
) -> None:
    """Makes sure that further calls give what the first one gives, parameters and buffers alike.

    Args:
        fresh: puts a copy of the model that was never called in the place of the one that is.
        began: what `shared_state` was before any copy was called.
        call: gives what the model returns for the example, its floats times a number, by the same
            random numbers.

    Raises:
        ModelError: naming the attribute that decides.
    """
    calls = _Calls(fresh, loss_fn, call)
    try:
        calls.begin(began)
        once = calls.again()
        calls.begin(began)
        states = [calls.state()]
        first = calls.again()
        same = _equal if _equal(once, first) else _alike
        states.append(calls.state())
        calls.again(times=2.0)
        states.append(calls.state())
        later = calls.again()
        states.append(calls.state())
        moving = _moving(*states[2:])
        if not same(first, later):
            other = changed(states[1], states[2]) or changed(states[0], states[1])
            keys = [*moving, *other, ""]
        else:
            ahead = calls.ahead(moving, *states[2:])
            keys = [] if all(same(first, run) for run in ahead) else moving
    except Exception:  # noqa: BLE001  # whatever the user's code raises: nothing is told
        return
    finally:
        calls.leave()
    if keys:
        raise _remembers(keys[0], calls.places, type(fresh()).forward)


def _by_far(value: Any, before: Any, after: Any) -> Any:
    """What a place holds after very many calls, which all change it as the last one did."""
    if isinstance(value, list):
        return value + value[-1:] * _MORE
    return value + _FAR * (after - before) if _is_number(value) else value


def _by_half(value: Any, _: Any, __: Any) -> Any:
    """What it holds on its way to 0."""
    return value / 2 if isinstance(value, float) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _moving(before: PythonState, after: PythonState) -> list[str]:
    """The numbers and lists that are not as they were."""
    kinds = (int, float, tuple)
    return [
        name
        for name in changed(before, after)
        if isinstance(after[name], kinds) and isinstance(before.get(name), kinds)
    ]


def _equal(one: _Run, other: _Run) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n].nan_to_num(), other[n].nan_to_num()) for n in one
    )


def _alike(one: _Run, other: _Run) -> bool:
    if one.keys() != other.keys() or any(one[n].shape != other[n].shape for n in one):
        return False
    return all(
        row.passed for row in compare({ComparedKind.OUTPUT: other}, {ComparedKind.OUTPUT: one})
    )


def _remembers(key: str, places: Mapping[str, Place], forward: object) -> ModelError:
    reader = places[key].reader if key in places else forward
    what = f"{key}, which forward changes," if key else "something that forward changes"
    return ModelError(
        f"another call of the model on the same batch gives another result: {what} decides what "
        "it computes, and a stage has one value of it",
        location=definition(reader),
        hint="keep it in a buffer of the model (register_buffer) that forward writes in place, or "
        "set it outside of forward",
    )
