"""How values get from device to device: what the engine asks of a transport."""

from __future__ import annotations

from typing import Protocol

import torch

from ..schedule.actions import SharedSum, Transfer


class Endpoint(Protocol):
    """One device's access to the others, for one run of its program.

    Nothing here waits but `take`, `flush` and `exchange`. Both ends go through their transfers in
    the order of the lowered program.
    """

    def send(self, transfer: Transfer, tensor: torch.Tensor | None) -> None:
        """Start sending; None stands for a gradient of zeros."""

    def expect(self, transfer: Transfer) -> None:
        """Get ready for a value that is to come; called where the program receives it."""

    def here(self, transfer: Transfer) -> bool:
        """Whether an expected value can be taken without waiting for it."""

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        """Wait for the value; None is a gradient of zeros.

        Raises:
            TransportError: when it does not come.
        """

    def exchange(self, total: SharedSum) -> None:
        """Sum the gradients of a shared parameter over the owners' devices."""

    def flush(self) -> None:
        """Wait until all that was sent has left."""
