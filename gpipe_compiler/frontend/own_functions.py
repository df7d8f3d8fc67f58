"""Carries whole through a trace what cannot be looked into.

That is `apply` of the user's own torch.autograd.Functions, and CTC with lengths in tensors.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import tree_leaves

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.calls import Written
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.own_code import written
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.frontend.recorder import recording
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.ir.own_functions import OwnFunction, own_function


@contextlib.contextmanager
def own_functions_carried() -> Iterator[None]:
    """Lets what is traced inside hold each of these as one operator.

    Functions that cannot be written into a package are traced through: as long as their backward is
    that of the ops of their forward, nothing is lost.
    """
    with _applied_by(_apply), mock.patch.object(torch, "ctc_loss", _ctc_loss):
        yield


@contextlib.contextmanager
def own_functions_met() -> Iterator[list[type]]:
    """The functions of the user's that what runs inside is differentiated through.

    To look for them in the graph of autograd afterwards would end the process where that is deep:
    torch frees nodes that Python has seen within one another.
    """
    met: list[type] = []

    def apply(cls: Any, *args: Any) -> Any:
        made = _plain(cls)(*args)
        leaves = (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
        if not cls.__module__.startswith("torch.") and any(leaf.requires_grad for leaf in leaves):
            met.append(cls)
        return made

    with _applied_by(apply):
        yield met


def own_backward(subject: Subject) -> TraceError | None:
    """Why a training step of this model cannot be traced right: a torch.autograd.Function of the
    user's; None where it is differentiated through none."""
    entry = Entry(subject, training=True)
    if not subject.training or entry.states.on_meta:
        return None
    with torch.enable_grad(), own_functions_met() as met:
        entry(*entry.signature.samples(2))
    if not met:
        return None
    own, why = met[-1], "what its backward does is in no trace"
    try:
        written(own)
    except UnwritableError as error:
        why = f"it cannot be written into a package: {error}"
    return TraceError(
        f"the model computes gradients by a torch.autograd.Function, {own.__name__}: {why}",
        location=definition(own),
        hint="define it at the top of a file, with what it uses; or write it without: "
        "x + (y - x).detach() has the value of y and passes its gradient on to x",
    )


_APPLY = inspect.getattr_static(torch.autograd.Function, "apply")

# Below the method in Python those are seen too that users hold by another name.
_BELOW = isinstance(_APPLY, classmethod)
_HOLDER = _SingleLevelFunction if _BELOW else torch.autograd.Function


def _applied_by(apply: Callable[..., Any]) -> contextlib.AbstractContextManager[object]:
    """While it is open, calls of every function go to `apply`, with its class."""
    return mock.patch.object(_HOLDER, "apply", classmethod(apply), create=True)


def _plain(cls: Any) -> Callable[..., Any]:
    applied: Callable[..., Any] = super(_HOLDER, cls).apply if _BELOW else _APPLY.__get__(None, cls)
    return applied


def _apply(cls: Any, *args: Any) -> Any:
    plain = _plain(cls)
    recorder = recording()
    if recorder is None or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
        return plain(*args)
    carried = carried_function(cls)
    if carried is None:
        return plain(*args)
    with recorder.paused():
        made = plain(*args)
    return recorder.record(Written(carried, args), made, (), effect=True)


_PLAIN_CTC_LOSS = torch.ctc_loss


def _ctc_loss(log_probs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What is kept of it for the backward goes with the longest target, which no fake knows."""
    names = ("targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    fake = isinstance(log_probs, FakeTensor)
    if not fake or not isinstance(given["input_lengths"], torch.Tensor):
        return _PLAIN_CTC_LOSS(log_probs, *args, **kwargs)
    each = given.get("reduction", _MEAN) == 0 and log_probs.dim() > 2
    return log_probs.sum((0, 2)) if each else log_probs.sum()


_MEAN = 1
"""As torch numbers the ways in which losses are reduced; 0 is none."""


def carried_function(cls: type[torch.autograd.Function]) -> OwnFunction | None:
    """What stands for a function in a graph; None for one of torch's, or one with no source."""
    if cls.__module__.partition(".")[0] == "torch":
        return None
    try:
        found = written(cls)
    except UnwritableError:
        return None
    return own_function(cls, found)
