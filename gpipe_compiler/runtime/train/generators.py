"""Seeding the generators that the user's code draws from, and leaving them alone.

Dropout and its kin draw from generators of their own (`random.py`).
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

from ..checkpoint.progress import RandomState

_NUMPY_SEEDS = 1 << 32


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
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
