"""Runs a model with torch.utils.checkpoint in it as if it kept its activations.

In a trace the nodes of each call are marked, so that a package recomputes them (`Op.checkpoint`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TypeAlias
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from gpipe_compiler.errors import ModelError, SourceLocation
from gpipe_compiler.frontend.comparable_runs import GRADIENT, Results, different, is_noise
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.recorder import recording

_Function: TypeAlias = Callable[..., object]

_ENTER, _EXIT = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
_REENTRANT: _Function = checkpoint.CheckpointFunction.apply

_Line: TypeAlias = SourceLocation | None
_Recomputed: TypeAlias = Callable[[_Line], bool]
"""Whether torch is to run again what is checkpointed in a line."""


def _nowhere(_: _Line) -> bool:
    return False


@contextlib.contextmanager
def activations_kept(
    *, trains: bool = False, but: _Recomputed = _nowhere
) -> Iterator[Sequence[_Line]]:
    """Lets checkpointed functions run once, as any other.

    What they compute is the same. But where every random op is seeded by itself (`SeededRandom`), a
    second run in the backward pass would draw other dropout masks than the first, and with
    `use_reentrant=True` torch.autograd.grad refuses.

    Args:
        trains: whether to refuse those for which plain PyTorch makes no gradients.
        but: which of them to leave to torch.

    Yields:
        The lines of checkpoints, as they are met.

    Raises:
        ModelError: for such a one, with its line.
    """
    reentrant: _Function = _refusing if trains else _directly
    lines: list[_Line] = []
    open_: list[contextlib.ExitStack | None] = []

    def is_left() -> bool:
        lines.append(calling_line())
        return but(lines[-1])

    def enter(hooks: saved_tensors_hooks) -> None:
        if not _drops(hooks):
            _ENTER(hooks)
        elif is_left():
            open_.append(None)
            _ENTER(hooks)
        else:
            around = contextlib.ExitStack()
            around.enter_context(_marking(len(lines) - 1))
            open_.append(around)

    def leave(hooks: saved_tensors_hooks, *raised: object) -> None:
        around = open_.pop() if _drops(hooks) else None
        if around is None:
            _EXIT(hooks, *raised)
        else:
            around.close()

    def apply(*args: object) -> object:
        if is_left():
            return _REENTRANT(*args)
        with _marking(len(lines) - 1):
            return reentrant(*args)

    # Users hold `checkpoint` itself under names of their own, so what it uses is replaced: the
    # hooks by which it drops what autograd saves, and the autograd function of reentrant ones.
    with (
        mock.patch.object(saved_tensors_hooks, "__enter__", enter),
        mock.patch.object(saved_tensors_hooks, "__exit__", leave),
        mock.patch.object(checkpoint, "CheckpointFunction", SimpleNamespace(apply=apply)),
    ):
        yield lines


def refuse_other_recomputation(
    run: Callable[[contextlib.AbstractContextManager[Sequence[_Line]]], Results],
) -> None:
    """Refuses a model whose checkpoints compute something else in the backward than they ran.

    Args:
        run: gives the results of a training step, entering this around its forward.
    """
    lines: Sequence[_Line] = ()

    @contextlib.contextmanager
    def noting() -> Iterator[Sequence[_Line]]:
        nonlocal lines
        with activations_kept() as lines:
            yield lines

    kept = run(noting())

    def departs(but: _Recomputed) -> bool:
        try:
            results = run(activations_kept(but=but))
        except checkpoint.CheckpointError:
            return True
        found = [n for n, _ in different(kept, results) if n.startswith(GRADIENT)]
        return bool(found) and not is_noise(found, kept, results)

    if not lines or not departs(lambda _: True):
        return

    def at(line: _Line) -> _Recomputed:
        return lambda met: met == line

    first = next((line for line in dict.fromkeys(lines) if departs(at(line))), lines[0])
    raise ModelError(
        "a checkpoint recomputes something else in the backward than it ran in the forward, so "
        "that plain PyTorch gives gradients of neither",
        location=first,
        hint="pass all that it uses as arguments: what a lambda in a loop reads by name is the "
        "last one when the backward runs, `checkpoint(lambda y, layer=layer: layer(y), x)` is not",
    )


@contextlib.contextmanager
def _marking(number: int) -> Iterator[None]:
    """Marks the nodes that a trace makes inside, if there is one."""
    recorder = recording()
    if recorder is None or recorder.position.checkpoint is not None:
        yield
        return
    recorder.position.checkpoint = number
    yield
    recorder.position.checkpoint = None


def _drops(hooks: saved_tensors_hooks) -> bool:
    """Whether hooks are those of a checkpoint, and not the user's own."""
    return type(hooks).__module__ == checkpoint.__name__


def _directly(function: _Function, _preserve: bool, *args: object) -> object:
    """What a reentrant checkpoint of a function returns, recorded by autograd as usual."""
    return function(*args)


def _refusing(function: _Function, _preserve: bool, *args: object) -> object:
    """The same; refused where plain PyTorch makes no gradients."""
    asks = [arg.requires_grad for arg in args if isinstance(arg, torch.Tensor)]
    if torch.is_grad_enabled() and not any(asks):
        raise ModelError(
            "a reentrant checkpoint is given nothing that requires gradients: plain PyTorch "
            "makes none for the parameters of what it runs",
            location=calling_line(),
            hint="use checkpoint(..., use_reentrant=False)",
        )
    return function(*args)
