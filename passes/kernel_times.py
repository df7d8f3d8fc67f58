"""How long kernels of this machine's processor take beside their rooflines.

A roofline does not know what a small call costs, that a batch normalisation reads its input more
than once, that dropout draws numbers, or how slow convolutions of few channels are. So a few calls
of every common kernel are timed once (`kernel_probes`), and kept (`cluster.cache`). Any machine can
repeat it; no network is run.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gpipe_compiler.cluster import Device, is_here, is_host, this_machine
from gpipe_compiler.cluster.cache import kept
from gpipe_compiler.errors import Notice
from gpipe_compiler.passes.cost import KernelCost

_LIMIT_S = 300.0

COMPUTES, MOVES = "mm", "mul"
"""The kernels like which others are taken to be, that multiply matrices and that do not."""

Points = tuple[tuple[float, float], ...]
"""Seconds by the roofline without any launch, and seconds measured, in order of the former."""


@dataclass(frozen=True)
class KernelTimes:
    """What was measured of the kernels of a processor.

    Attributes:
        points: by the names of kernels.
        reference: by whose roofline they are compared: the processor when they were timed.
    """

    points: Mapping[str, Points]
    reference: Device

    @classmethod
    def of(
        cls, found: Mapping[str, Iterable[tuple[float, float]]], reference: Device
    ) -> KernelTimes:
        """In order, from the roofline's seconds to those measured; of kernels that are alike by the
        roofline, as of other shapes, the mean."""
        return cls({name: tuple(_joined(each)) for name, each in found.items()}, reference)

    def seconds(self, kernel: KernelCost) -> float:
        """Of a kernel: between two measured sizes as a power of the roofline's; below the smallest
        as long as that, above the largest as many times the roofline."""
        points = self._points_of(kernel)
        ideal_s = kernel.ideal_s(self.reference)
        place = bisect_right(points, (ideal_s, math.inf))
        if place == 0:
            return points[0][1]
        if place == len(points):
            known_s, measured_s = points[-1]
            return measured_s * ideal_s / known_s
        (one, one_s), (other, other_s) = points[place - 1 : place + 1]
        share = math.log(ideal_s / one) / math.log(other / one)
        return math.exp(math.log(one_s) * (1 - share) + math.log(other_s) * share)

    def _points_of(self, kernel: KernelCost) -> Points:
        """Those of the kernel, of one whose name says less, or of one like which it is taken."""
        name = kernel.name
        while name and name not in self.points:
            name = name.rpartition(", ")[0]
        return self.points[name or (COMPUTES if kernel.flops else MOVES)]

    def to_fields(self) -> dict[str, Any]:
        device = self.reference
        return {"roofline": [device.flops, device.memory_bandwidth], "kernels": self.points}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> KernelTimes | None:
        """None where the commonest kernels are missing."""
        found = {
            name: tuple((float(one), float(other)) for one, other in each)
            for name, each in fields.get("kernels", {}).items()
        }
        if not {COMPUTES, MOVES} <= found.keys():
            return None
        return cls(found, reference(*fields["roofline"]))


_ALIKE = 1.25
"""How many times as long by the roofline a kernel may be to count as one point with another."""


def _joined(points: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points in order, the geometric mean of those that are alike."""
    ordered = sorted(points)
    start = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place][0] > _ALIKE * ordered[start][0]:
            alike = ordered[start:place]
            yield alike[0] if not alike[1:] else _mean(alike)
            start = place


def _mean(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    ideals, seconds = zip(*points, strict=True)
    return statistics.geometric_mean(ideals), statistics.geometric_mean(seconds)


def reference(flops: float, bandwidth: float) -> Device:
    """A device by whose roofline kernels are compared."""
    return Device("", float(flops), float(bandwidth), memory=0, launch_s=0.0)


def kernel_times(device: Device) -> KernelTimes | None:
    """Those of a device that is this machine's processor; None for any other."""
    if not (is_host(device) and is_here(device)):
        return None
    return _here(torch.get_num_threads())


@cache
def _here(threads: int) -> KernelTimes | None:
    """Of torch with so many threads; None where they cannot be measured."""
    return KernelTimes.from_fields(kept("kernels", lambda: _measured(this_machine())))


def measured_anew(device: Device) -> KernelTimes | None:
    """The same for the processor of this machine, measured now and kept."""
    _here.cache_clear()
    return KernelTimes.from_fields(kept("kernels", lambda: _measured(device), anew=True))


def _measured(device: Device) -> Mapping[str, Any]:
    """What `kernel_probes` prints as a program; nothing where it fails, which is told."""
    given = json.dumps([device.flops, device.memory_bandwidth, torch.get_num_threads()])
    command = [sys.executable, "-m", "gpipe_compiler.passes.kernel_probes", given]
    settings = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        done = subprocess.run(
            command, env=settings, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
        found: Mapping[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        warnings.warn(Notice(f"kernels of this machine cannot be timed: {error}"), stacklevel=2)
        return {}
    return found
