"""Runs a model with torch.utils.checkpoint in it as if it kept its activations.

In a trace the nodes of each call are marked, so that a package recomputes them (`Op.checkpoint`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

from gpipe_compiler.errors import GPipeCompilerError, ModelError
from gpipe_compiler.frontend.locate import calling_line

CHECKPOINT = "gpipe_compiler_checkpoint"
"""Key of node.meta: number of the outermost checkpoint that the node was made in."""

_Function: TypeAlias = Callable[..., object]

_ENTER, _EXIT = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__


@contextlib.contextmanager
def activations_kept(*, trains: bool = False) -> Iterator[None]:
    """Lets checkpointed functions run once, as any other.

    What they compute is the same. But where every random op is seeded by itself (`SeededRandom`), a
    second run in the backward pass would draw other dropout masks than the first, and with
    `use_reentrant=True` torch.autograd.grad refuses.

    Args:
        trains: whether to refuse those for which plain PyTorch makes no gradients.

    Raises:
        ModelError: for such a one, with its line.
        GPipeCompilerError: where this version of torch runs them twice all the same.
    """
    _check()
    with _kept(_refusing if trains else _directly):
        yield


@contextlib.contextmanager
def _kept(reentrant: _Function) -> Iterator[None]:
    numbers = itertools.count()
    open_: list[contextlib.ExitStack] = []

    def enter(hooks: saved_tensors_hooks) -> None:
        if not _drops(hooks):
            _ENTER(hooks)
            return
        open_.append(contextlib.ExitStack())
        open_[-1].enter_context(_marking(next(numbers)))

    def leave(hooks: saved_tensors_hooks, *raised: object) -> None:
        if _drops(hooks):
            open_.pop().close()
        else:
            _EXIT(hooks, *raised)

    def apply(*args: object) -> object:
        with _marking(next(numbers)):
            return reentrant(*args)

    # Users hold `checkpoint` itself under names of their own, so what it uses is replaced: the
    # hooks by which it drops what autograd saves, and the autograd function of reentrant ones.
    with (
        mock.patch.object(saved_tensors_hooks, "__enter__", enter),
        mock.patch.object(saved_tensors_hooks, "__exit__", leave),
        mock.patch.object(checkpoint, "CheckpointFunction", SimpleNamespace(apply=apply)),
    ):
        yield


@contextlib.contextmanager
def _marking(number: int) -> Iterator[None]:
    """Marks the nodes that a trace makes inside, if there is one."""
    mode = get_proxy_mode()
    if mode is None:
        yield
        return
    graph: Any = mode.tracer.graph
    before = next(reversed(graph.nodes), None)
    yield
    for node in itertools.takewhile(lambda node: node is not before, reversed(graph.nodes)):
        node.meta[CHECKPOINT] = number


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


@cache
def _check() -> None:
    """Holds this version of torch to what is replaced in it: a checkpointed function runs once."""
    calls: list[bool] = []

    def counted(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        calls.append(reentrant)
        return x.sin()

    with torch.enable_grad(), _kept(_directly):
        for reentrant in (False, True):
            x = torch.ones(1, requires_grad=True)
            y = checkpoint.checkpoint(counted, x, reentrant, use_reentrant=reentrant)
            torch.autograd.grad(y, x)
    if calls != [False, True]:
        raise GPipeCompilerError(
            f"torch {torch.__version__} runs what torch.utils.checkpoint wraps twice, in a way "
            "that this compiler does not know: a comparison with the model would be wrong",
            hint="use a version of torch that gpipe-compiler is tested with (its README names it)",
        )
