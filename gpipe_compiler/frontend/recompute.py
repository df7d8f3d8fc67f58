"""Runs a model with torch.utils.checkpoint in it as if it kept its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from torch.utils import checkpoint


@contextlib.contextmanager
def activations_kept() -> Iterator[None]:
    """Lets checkpointed functions run once, as any other.

    What they compute is the same. But where every random op is seeded by itself (`SeededRandom`), a
    second run in the backward pass would draw other dropout masks than the first, and with
    `use_reentrant=True` torch.autograd.grad refuses.
    """
    # Users hold `checkpoint` itself under names of their own, so what it calls is replaced.
    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", _once),
        mock.patch.object(checkpoint, "CheckpointFunction", _Directly),
    ):
        yield


def _once(*_: object, **__: object) -> Iterator[None]:
    """The generator around a checkpointed call, without hooks."""
    yield


class _Directly:
    """Stands for the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., object], _preserve: bool, *args: object) -> object:
        """The function's result, recorded by autograd as usual."""
        return function(*args)
