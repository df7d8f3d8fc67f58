"""How values get from one device to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onnxruntime import OrtValue


class Endpoint(Protocol):
    """A device's end of all links."""

    def begin(self, microbatch: int) -> None:
        """Wait until there is room for another micro-batch on its way."""

    def take(self, name: str, microbatch: int, source: int) -> OrtValue:
        """A value that the stage `source` has made; waits for it."""

    def send(self, name: str, microbatch: int, value: OrtValue, targets: Sequence[int]) -> None:
        """Hand a value to these stages."""

    def end(self, microbatch: int) -> None:
        """This device is done with a micro-batch."""

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
