"""The process's own random generators, which data and optimizers may draw from.

Dropout and its kin draw from generators of their own (`random.py`); what is left is the user's code.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_NUMPY_SEEDS = 1 << 32


@dataclass(frozen=True, eq=False)
class Generators:
    """The states of all generators of this process at some moment.

    Attributes:
        python: of the module `random`.
        numpy: of `numpy.random`, None where numpy is not loaded.
        cpu: of torch on the host.
        cuda: of torch on every GPU, none where CUDA is not in use.
    """

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> Generators:
        """The present states."""
        numpy = sys.modules.get("numpy")
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else (),
        )

    def restore(self) -> None:
        """Put the states back. GPUs that were not in use then, or are not there now, stay."""
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if self.numpy is not None and numpy is not None:
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda and torch.cuda.is_available():
            for device, state in enumerate(self.cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)


def seed_all(seed: int) -> None:
    """Seed every generator of the process, so that data shuffled by any of them is the same."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEEDS)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside has not been drawn afterwards."""
    before = Generators.now()
    try:
        yield
    finally:
        before.restore()
