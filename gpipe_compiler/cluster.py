"""The machines a plan is for: devices (speed, memory) and the links between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One device that runs stages.

    Attributes:
        flops: arithmetic it sustains on large fp32 matrix products, FLOP/s.
        memory_bandwidth: bytes/s it sustains reading and writing memory.
        memory: bytes it holds.
        launch_s: seconds that any op costs, however small.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: int
    launch_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two devices: bytes/s in each direction, and seconds before the first byte."""

    bandwidth: float
    latency_s: float

    def seconds(self, size: int) -> float:
        """Time to move `size` bytes; nothing moves in no time."""
        return self.latency_s + size / self.bandwidth if size else 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices in a row, one per stage, with equal links between any two."""

    device: Device
    link: Link
