"""A model as training may leave it: what forward writes to, further on.

A counter or a flag may decide by `torch.where` whether samples meet, and the first states do not
show it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn

from gpipe_compiler.frontend.comparable_runs import with_other_weights
from gpipe_compiler.frontend.state import isolated, named_state
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.quiet import quiet
from gpipe_compiler.validate.forced_gates import force_gates

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
    """The numbers among what forward writes to."""
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
