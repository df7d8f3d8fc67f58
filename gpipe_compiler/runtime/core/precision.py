"""Computing in 16 bits: torch.autocast around each stage's forward, on the thread that runs it.

Autocast keeps the 16-bit copy of every weight until its outermost region is left, so that a weight
is cast once, and the gradients of all its uses in a forward are summed before they are cast back.
Here a region is a whole run, over all micro-batches: were it a stage's forward, every micro-batch
that waits for its backward would hold copies of its own. The copies lie in one table of the
process: the thread that ends first must not empty it under the others, so the runner does, after
all of them. No copy outlives its run, and the optimizer's step comes after that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from ..spec import Precision

_LOWER = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def lower_dtype(precision: Precision) -> torch.dtype | None:
    """The type that autocast casts to; None for a precision without autocast."""
    return _LOWER.get(precision)


@contextlib.contextmanager
def run_of_device(precision: Precision) -> Iterator[None]:
    """Around all that a device's thread does in a run: weights stay cast from forward to forward.

    Autocast is not on in between: it is for forwards only.
    """
    if lower_dtype(precision) is None:
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Around one forward of a stage that computes on `device`, its loss included."""
    dtype = lower_dtype(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


@contextlib.contextmanager
def layers_by_ops() -> Iterator[None]:
    """Lets PyTorch compute encoder layers by their ops, as stages do, and not as one kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def no_weight(argument: torch.Tensor) -> torch.Tensor:
    """A stage's argument that needs a gradient, as autocast is to see it: as no leaf of the graph.

    In the plain model it is none: every use of it is cast by itself, and the gradients are summed
    after they were cast back. A leaf would be taken for a weight.
    """
    return argument.view_as(argument)


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Whether autocast is on for a kind of device, and what it casts to."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> Self:
        """As it is here."""
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> contextlib.AbstractContextManager[object]:
        """As it was there."""
        if self == AutocastState.now(self.kind):
            return contextlib.nullcontext()
        return torch.autocast(self.kind, self.dtype, self.enabled)


@contextlib.contextmanager
def run_of_devices(precision: Precision) -> Iterator[None]:
    """Around the run of all devices of this process: no weight stays cast afterwards."""
    try:
        yield
    finally:
        if lower_dtype(precision) is not None:
            torch.clear_autocast_cache()
