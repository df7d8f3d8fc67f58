"""The position of a training run, and the random number generators that its data depends on."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """An object with a state besides model and optimizer: a learning-rate schedule, a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, of numbers, words, lists, dicts and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of a process that data is shuffled and augmented with.

    Attributes:
        torch_cuda: torch's generators on the GPUs that this process has used, in order.
        python: as `random.getstate` gives it.
        numpy: as `numpy.random.get_state` gives it, its array as a tuple; None without numpy.
    """

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> RandomState:
        """The generators as they are."""
        numpy = sys.modules.get("numpy")
        drawn: tuple[Any, ...] | None = None
        if numpy is not None:
            kind, words, *rest = numpy.random.get_state()
            drawn = (str(kind), tuple(words.tolist()), *rest)
        cuda: list[torch.Tensor] = []
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
            cuda = torch.cuda.get_rng_state_all()
        return cls(torch.get_rng_state(), tuple(cuda), random.getstate(), drawn)

    def restore(self) -> None:
        """Set the generators back; those of GPUs that are not here stay as they are."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda and torch.cuda.is_available():
            for device, state in enumerate(self.torch_cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a training run, between two steps of the optimizer.

    Attributes:
        step: steps of the optimizer that are done.
        epoch: passes over the data that are finished.
        batch: mini-batches of the pass under way that are used up.
        random: the generators when the pass under way began: with them set back, the data comes
            again as it came.
        current: the generators now, which the user's optimizer may draw from, too.
        data: the `state_dict` of the user's data, of plain values and tensors, where it has one:
            then it is set back by this, and not by running through the pass again.
        seed, step_number: those of the pipeline, on which masks of dropout depend; they are taken
            from it when a checkpoint is written, and given back to it when it is read.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    random: RandomState | None = None
    current: RandomState | None = None
    data: Any = None
    seed: int = 0
    step_number: int = 0


_COUNTS = ("step", "epoch", "batch", "seed", "step_number")
_GENERATORS = ("random", "current")


def counts_of(progress: Progress) -> dict[str, int]:
    return {name: getattr(progress, name) for name in _COUNTS}


def items_of(progress: Progress) -> dict[str, Any]:
    """The rest of a progress, as dicts of plain values and tensors."""
    items: dict[str, Any] = {"data": progress.data}
    for name in _GENERATORS:
        state = getattr(progress, name)
        if state is not None:
            items[name] = {field.name: getattr(state, field.name) for field in fields(state)}
    return items


def progress_from(counts: Mapping[str, int], items: Mapping[str, Any]) -> Progress:
    states = {name: RandomState(**items[name]) for name in _GENERATORS if name in items}
    known: dict[str, Any] = {**counts, **states, "data": items.get("data")}
    return Progress(**known)


_NUMPY_SEEDS = 1 << 32


def seed_all(seed: int) -> None:
    """Seed every generator of the process, so that data shuffled by any of them is the same."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
