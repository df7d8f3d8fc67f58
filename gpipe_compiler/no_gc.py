"""Keeps garbage collection off while many objects are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without collections of garbage, for code that makes millions of objects which all live.

    Each collection would look through all of them: a fifth of the time of the largest plans. What
    is garbage goes when its last reference does, but for cycles, which wait. Not for code
    that works long on tensors with memory.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """As `uncollected`, for imports: what they make lives to the end, and no later collection
    looks at it either."""
    with uncollected():
        yield
        gc.freeze()
