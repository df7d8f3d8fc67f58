"""How long kernels of this machine's processor take beside their rooflines.

A roofline does not know what a small call costs, that a batch normalisation reads its input more
than once, that dropout draws numbers, or how slow convolutions of few channels are. So a few calls
of every common kernel are timed once, forwards and backwards, from tiny to large (ten seconds), and
kept (`cluster.cache`). Any machine can repeat it; no network is run.

`python -m gpipe_compiler.passes.kernel_times '[FLOPS, BANDWIDTH, THREADS]'` prints the fields of
`KernelTimes`. It is a process of its own, which keeps freed memory as packages do: `run.py` lets
malloc keep it, and a kernel that gets new pages from the system takes several times as long.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe_compiler.cluster import Device, is_here, is_host, this_machine
from gpipe_compiler.cluster.cache import kept
from gpipe_compiler.cluster.local import typical_seconds
from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.errors import Notice
from gpipe_compiler.passes.cost import KernelCost, KernelCount
from gpipe_compiler.runtime.train.process import keep_memory

_LIMIT_S = 300.0

COMPUTES, MOVES = "mm", "mul"
"""The kernels like which others are taken to be, that multiply matrices and that do not."""

Points = tuple[tuple[float, float], ...]
"""Seconds by the roofline without any launch, and seconds measured, in order of the former."""


@dataclass(frozen=True)
class KernelTimes:
    """What was measured of the kernels of a processor, by name.

    Attributes:
        reference: by whose roofline they are compared: the processor when they were timed.
    """

    points: Mapping[str, Points]
    reference: Device

    @classmethod
    def of(cls, found: Mapping[str, Mapping[float, float]], reference: Device) -> KernelTimes:
        """In order, from the roofline's seconds to those measured."""
        return cls({name: tuple(sorted(each.items())) for name, each in found.items()}, reference)

    def seconds(self, kernel: KernelCost) -> float:
        """Of a kernel: between two measured sizes as a power of the roofline's; below the smallest
        as long as that, above the largest as many times the roofline."""
        points = self.points.get(kernel.name) or self.points[COMPUTES if kernel.flops else MOVES]
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
    """What this module prints as a program; nothing where it fails, which is told."""
    given = json.dumps([device.flops, device.memory_bandwidth, torch.get_num_threads()])
    command = [sys.executable, "-m", "gpipe_compiler.passes.kernel_times", given]
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


# --- the calls that are timed -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Probe:
    """A call of a kernel, in sizes from tiny to large.

    Attributes:
        shapes: for every size those of its arguments; all but the `fixed` first need a gradient.
    """

    run: Callable[..., Tensor]
    shapes: Sequence[Sequence[tuple[int, ...]]]
    fixed: int = 0


def _conv(kernel: int, groups: int = 1, stride: int = 1) -> Callable[..., Tensor]:
    return partial(F.conv2d, padding=kernel // 2, groups=groups, stride=stride)


def _images(*sizes: tuple[int, int, int]) -> list[list[tuple[int, ...]]]:
    """Of samples, channels and side, as one argument."""
    return [[(n, c, side, side)] for n, c, side in sizes]


def _convolved(channels: int, window: int) -> list[list[tuple[int, ...]]]:
    """Images and weights: from channels to as many, from few images to more."""
    sizes = ((1, 7), (4, 14), (8, 28), (8, 56))
    weight = (channels, channels, window, window)
    return [[(n, channels, side, side), weight] for n, side in sizes]


_ROWS: list[list[tuple[int, ...]]] = [[(4, 16)], [(128, 256)], [(1024, 512)], [(2048, 2048)]]
_TWO_ROWS = [[shape, shape] for (shape,) in _ROWS]
_SIDES = _images((1, 4, 8), (4, 32, 16), (8, 64, 28), (8, 64, 112))


def _normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _classified(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64))


def _looked_up(weight: Tensor) -> Tensor:
    return F.embedding(torch.arange(weight.shape[0] // 2), weight)


def _depthwise(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1, groups=x.shape[1])


_PRODUCTS = ((4, 8, 8), (32, 64, 64), (128, 256, 256), (1024, 512, 1024))
_BATCHES = ((2, 4, 4), (8, 32, 16), (16, 128, 32), (32, 256, 64))
_HEADS = ((1, 2, 8, 8), (2, 4, 64, 32), (4, 8, 128, 32), (4, 8, 384, 64))
_PICTURES = ((1, 16), (4, 64), (8, 112))
_MAPS = ((1, 8, 8), (2, 32, 14), (4, 64, 28), (8, 128, 56))
"""Sizes of products, heads of attention, and samples, channels and sides of images."""

_PROBES: tuple[_Probe, ...] = (
    *(
        _Probe(run, _TWO_ROWS)
        for run in (torch.mul, torch.add, torch.div, torch.sub, torch.maximum)
    ),
    *(
        _Probe(run, _ROWS)
        for run in (
            *(torch.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.hardswish, F.leaky_relu),
            *(torch.exp, torch.sqrt, torch.abs, torch.square, torch.clone, torch.neg, F.hardtanh),
            *(F.elu, F.softplus, torch.erf, torch.cos, torch.rsqrt, F.hardsigmoid, torch.log),
            partial(F.softmax, dim=-1),
            partial(F.log_softmax, dim=-1),
            partial(torch.sum, dim=0),
            partial(torch.mean, dim=-1),
            partial(F.dropout, p=0.1),
            partial(torch.pow, exponent=3.0),
            _classified,
            _looked_up,
        )
    ),
    _Probe(lambda x, y: torch.cat([x, y], 1), _TWO_ROWS),
    _Probe(lambda x: x.t().contiguous(), _ROWS),
    _Probe(
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        [[shape, shape[1:], shape[1:]] for (shape,) in _ROWS],
    ),
    _Probe(
        _normalised,
        [[shape, shape[1:2], shape[1:2]] for (shape,) in _SIDES],
    ),
    _Probe(
        lambda x, w, b: F.group_norm(x, 4, w, b),
        [[shape, shape[1:2], shape[1:2]] for (shape,) in _SIDES],
    ),
    _Probe(partial(F.max_pool2d, kernel_size=2), _SIDES),
    _Probe(partial(F.avg_pool2d, kernel_size=2), _SIDES),
    _Probe(lambda x: F.adaptive_avg_pool2d(x, 1), _SIDES),
    _Probe(partial(F.interpolate, scale_factor=2.0), _SIDES),
    _Probe(partial(F.interpolate, scale_factor=2.0, mode="bilinear"), _SIDES),
    _Probe(torch.mm, [[(n, k), (k, m)] for n, k, m in _PRODUCTS]),
    _Probe(F.linear, [[(n, k), (m, k), (m,)] for n, k, m in _PRODUCTS]),
    _Probe(torch.bmm, [[(b, n, k), (b, k, n)] for b, n, k in _BATCHES]),
    _Probe(F.scaled_dot_product_attention, [[shape] * 3 for shape in _HEADS]),
    *(
        _Probe(_conv(window), _convolved(channels, window))
        for channels in (16, 32, 64)
        for window in (1, 3)
    ),
    _Probe(_conv(7, stride=2), [[(n, 3, side, side), (32, 3, 7, 7)] for n, side in _PICTURES], 1),
    _Probe(_depthwise, [[(n, c, s, s), (c, 1, 3, 3)] for n, c, s in _MAPS]),
    _Probe(_conv(3, groups=4), [[(n, c, s, s), (c, c // 4, 3, 3)] for n, c, s in _MAPS]),
    _Probe(
        partial(F.conv_transpose2d, stride=2),
        [[(n, c, s, s), (c, c // 2, 2, 2)] for n, c, s in _MAPS],
    ),
)


@dataclass
class _Points:
    """Collects what is measured of kernels, by name."""

    device: Device
    single: dict[str, dict[float, float]] = field(default_factory=dict)
    joint: list[tuple[list[KernelCost], float]] = field(default_factory=list)

    def take(self, kernels: list[KernelCost], seconds: float) -> None:
        if len(kernels) == 1:
            self._put(kernels[0], seconds)
        elif kernels:
            self.joint.append((kernels, seconds))

    def _put(self, kernel: KernelCost, seconds: float) -> None:
        ideal_s = kernel.ideal_s(self.device)
        if ideal_s > 0:
            self.single.setdefault(kernel.name, {})[ideal_s] = seconds

    def found(self) -> KernelTimes:
        """Of kernels that were timed alone; of others what is left of a call without those: the
        longest of them took all of it."""
        known = KernelTimes.of(self.single, self.device)
        least_s = min(seconds for each in self.single.values() for seconds in each.values())
        for kernels, seconds in self.joint:
            unknown = [kernel for kernel in kernels if kernel.name not in known.points]
            if unknown:
                longest = max(unknown, key=lambda kernel: kernel.ideal_s(self.device))
                rest = [kernel for kernel in kernels if kernel is not longest]
                others_s = sum(map(known.seconds, rest))
                self._put(longest, max(seconds - others_s, least_s))
        return KernelTimes.of(self.single, self.device)


def measured(device: Device) -> KernelTimes:
    """Seconds of every kernel by the roofline of a device, and as measured here."""
    points = _Points(device)
    torch.manual_seed(0)
    started_s = _started_s()
    for probe in _PROBES:
        for shapes in probe.shapes:
            _time(probe, shapes, points, started_s)
    return points.found()


def _started_s() -> float:
    """What it takes to start a backward, beside the nodes of the graph: it has one, or many."""
    many = 41
    x = torch.rand(4).requires_grad_()

    def seconds(count: int) -> float:
        y = x
        for _ in range(count):
            y = y.neg()
        gradient = torch.ones_like(y)
        run = partial(torch.autograd.grad, y, x, gradient, retain_graph=True)
        return typical_seconds(run, _CPU, tries=41)

    one_s, many_s = seconds(1), seconds(many)
    return max(0.0, one_s - (many_s - one_s) / (many - 1))


def _time(
    probe: _Probe, shapes: Sequence[tuple[int, ...]], points: _Points, started_s: float
) -> None:
    """Times a call and its backward, and counts the kernels of each."""
    inputs = [torch.rand(shape).add_(0.5) for shape in shapes]
    leaves = inputs[probe.fixed :]
    for leaf in leaves:
        leaf.requires_grad_()
    forward, backward = KernelCount(), KernelCount()
    with DispatchWatch(forward.saw):
        result = probe.run(*inputs)
    gradient = torch.ones_like(result)

    def back() -> object:
        return torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    with DispatchWatch(backward.saw):
        back()
    tries = 5 if result.numel() > _QUICK else 21
    forward_s = typical_seconds(lambda: probe.run(*inputs), _CPU, tries)
    backward_s = typical_seconds(back, _CPU, tries) - started_s
    points.take(forward.kernels, forward_s)
    points.take(backward.kernels, max(backward_s, started_s / 10))


_CPU = torch.device("cpu")
_QUICK = 2**15
"""Elements of results up to which calls are repeated more often."""


def _main(given: str) -> None:
    flops, bandwidth, threads = json.loads(given)
    torch.set_num_threads(int(threads))
    keep_memory()
    print(json.dumps(measured(reference(flops, bandwidth)).to_fields()))


if __name__ == "__main__":
    _main(sys.argv[1])
