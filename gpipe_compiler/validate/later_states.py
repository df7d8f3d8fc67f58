"""A model as training may leave it: what forward writes to, further on.

A counter or a flag may decide by `torch.where` whether samples meet, and the first states do not
show it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpipe_compiler.frontend.comparable_runs import with_other_weights
from gpipe_compiler.frontend.state import isolated, named_state
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.quiet import quiet

_CALLS = 3
"""Forwards, after which the first of the later states is looked at."""

_FURTHER = (30, 1_000, 100_000)
"""Of such forwards, for what goes on by the same number in each."""


class LaterModel(NamedTuple):
    """A model as it may be later.

    Attributes:
        forced: whether comparisons come out otherwise than they are, which a graph of it does not
            follow.
    """

    model: nn.Module
    forced: bool = False


def later_models(
    subject: Subject, names: Collection[str], *, training: bool
) -> Iterator[LaterModel]:
    """Copies of a model with other weights, and with the state that goes on as it is later.

    None where nothing goes on, or where the model does not run there.

    Args:
        names: of what forward writes to, and of single numbers that it may be decided by.
        training: whether forward is called in training.
    """
    model = _moved(subject.model) if names else None
    if model is None or not _goes_on(model, subject, training):
        return
    earlier = _counters(model, names)
    for _ in range(_CALLS - 1):
        if not _goes_on(model, subject, training):
            return
        before, earlier = earlier, _counters(model, names)
    model = _moved(model) or model  # or averages of weights would be the weights
    yield LaterModel(model)
    steps = {name: earlier[name] - before[name] for name in earlier}
    for further in _FURTHER if any(steps.values()) else ():
        jumped = isolated(model)
        _jump(jumped, {name: earlier[name] + further * step for name, step in steps.items()})
        if _goes_on(isolated(jumped), subject, training):
            yield LaterModel(jumped)
    for outcome in (True, False):
        forced = isolated(model)
        force_gates(forced, names, outcome=outcome)
        if _goes_on(isolated(forced), subject, training):
            yield LaterModel(forced, forced=True)


def _moved(model: nn.Module) -> nn.Module | None:
    """A copy with other weights, if it has any; None of one without numbers."""
    if any(item.is_meta for item in (*model.parameters(), *model.buffers())):
        return None
    moved = with_other_weights(model)
    return isolated(model) if moved is None else moved


def _goes_on(model: nn.Module, subject: Subject, training: bool) -> bool:
    """Runs one more forward; whether the model takes it."""
    own = subject.with_example(torch.clone)
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet():
            model.train(training)(*own.args, **own.kwargs)
    except Exception:  # noqa: BLE001  # whatever the user's code raises
        return False
    return True


def _counters(model: nn.Module, names: Collection[str]) -> dict[str, float]:
    held = dict(named_state(model))
    return {
        name: held[name].item()
        for name in names
        if name in held and held[name].numel() == 1 and not held[name].is_complex()
    }


@torch.no_grad()
def _jump(model: nn.Module, counters: dict[str, float]) -> None:
    held = dict(named_state(model))
    for name, number in counters.items():
        item = held[name]
        if item.dtype is not torch.bool:
            kind = torch.finfo if item.is_floating_point() else torch.iinfo
            limits = kind(item.dtype)
            item.fill_(min(max(number, limits.min), limits.max))


_COMPARISONS = frozenset(
    {
        *("gt", "ge", "lt", "le", "eq", "ne"),
        *("__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal"),
    }
)


_MOST_FORCED = 1_000
"""Comparisons in one forward; a loop on what is forced has more."""


def force_gates(model: nn.Module, names: Collection[str], *, outcome: bool) -> None:
    """Changes a model, and so its copies: single numbers and flags among its state decide so.

    A counter may let samples meet in a window of calls that nobody knows, as
    `torch.where((n > 200) & (n < 300), ...)` does, or a flag that is set between steps.

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
        self._left = _MOST_FORCED
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
        made = func(*args, **(kwargs or {}))
        given = tensors_in((args, dict(kwargs or {})))
        if any(id(tensor) not in self._known for tensor in given):
            return made
        decides = any(id(tensor) in self._deciding for tensor in given)
        if decides and getattr(func, "__name__", "") in _COMPARISONS and made.numel() == 1:
            self._left -= 1
            if not self._left:
                raise RuntimeError("a loop that ends by such a comparison never does")
            made = torch.full_like(made, self._outcome)
        for tensor in tensors_in(made):
            self._known[id(tensor)] = tensor
            if decides:
                self._deciding[id(tensor)] = tensor
        return made
