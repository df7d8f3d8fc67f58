"""Where a run of training stands, and the random numbers that its data came from."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of a process that data is shuffled and augmented with.

    Attributes:
        torch_cpu: torch's generator on the CPU.
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
        if torch.cuda.is_available() and torch.cuda.is_initialized():
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
    """Where a run of training stands, between two steps of the optimizer.

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
