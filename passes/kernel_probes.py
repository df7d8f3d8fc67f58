"""Times calls of every common kernel of torch on this machine's processor, from tiny to large.

They run as in the training of a model: forward through all of them, then backward, and again. So
each finds in the caches what a model leaves there: the tensor that was just made, and little else.

`python -m gpipe_compiler.passes.kernel_probes '[FLOPS, BANDWIDTH, THREADS]'` prints the fields of
`KernelTimes`. It is a process of its own, which keeps freed memory as packages do: `run.py` lets
malloc keep it, and a kernel that gets new pages from the system takes several times as long.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe_compiler.cluster import Device
from gpipe_compiler.cluster.local import clocked, typical_seconds
from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.passes.cost import KernelCost, KernelCount
from gpipe_compiler.passes.kernel_times import KernelTimes, reference
from gpipe_compiler.runtime.train.process import keep_memory


@dataclass(frozen=True, slots=True)
class Probe:
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
    """Images and weights: from channels to as many, from few images to more; of many channels the
    images are small."""
    sides = (7, 14, 28, 56) if channels < 128 else (3, 4, 7, 14)
    weight = (channels, channels, window, window)
    samples = (1, 4, 8, 8)
    return [[(n, channels, s, s), weight] for n, s in zip(samples, sides, strict=True)]


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
    return F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=x.shape[1])


def _remembered(x: Tensor, *weights: Tensor) -> Tensor:
    state = x.new_zeros(1, x.shape[1], weights[1].shape[1])
    made: Tensor = torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, False)[0]
    return made


_PRODUCTS = ((4, 8, 8), (32, 64, 64), (128, 256, 256), (1024, 512, 1024))
_OF_FEW_ROWS = ((2, 64, 64), (4, 256, 512), (8, 1024, 1024), (8, 4096, 2048))
_SEQUENCES = ((4, 2, 8), (16, 4, 32), (32, 16, 128), (64, 32, 512))
_BATCHES = ((2, 4, 4), (8, 32, 16), (16, 128, 32), (32, 256, 64))
_HEADS = ((1, 2, 8, 8), (2, 4, 64, 32), (4, 8, 128, 32), (4, 8, 384, 64))
_PICTURES = ((1, 16), (4, 64), (8, 112))
_MAPS = ((1, 8, 8), (2, 32, 14), (4, 64, 28), (8, 128, 56))
_SMALL_MAPS = ((1, 64, 3), (4, 256, 4), (8, 512, 7), (8, 512, 14))
_SMALL_SIDES = [[(n, c, side, side)] for n, c, side in _SMALL_MAPS]
"""Sizes of products, steps, samples and features of sequences, heads of attention, and samples,
channels and sides of images."""

PROBES: tuple[Probe, ...] = (
    *(Probe(run, _TWO_ROWS) for run in (torch.mul, torch.add, torch.div, torch.sub, torch.maximum)),
    *(
        Probe(run, _ROWS)
        for run in (
            *(torch.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.hardswish, F.leaky_relu),
            *(torch.exp, torch.sqrt, torch.abs, torch.square, torch.clone, torch.neg, F.hardtanh),
            *(F.elu, F.softplus, torch.erf, torch.cos, torch.rsqrt, F.hardsigmoid, torch.log),
            partial(F.softmax, dim=-1),
            partial(F.log_softmax, dim=-1),
            partial(torch._safe_softmax, dim=-1),  # of attention that is not fused
            partial(torch.sum, dim=0),
            partial(torch.mean, dim=-1),
            partial(F.dropout, p=0.1),
            partial(torch.pow, exponent=3.0),
            _classified,
            _looked_up,
        )
    ),
    Probe(lambda x, y: torch.cat([x, y], 1), _TWO_ROWS),
    Probe(lambda x: x.t().contiguous(), _ROWS),
    Probe(
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        [[shape, shape[1:], shape[1:]] for (shape,) in _ROWS],
    ),
    *(
        Probe(_normalised, [[shape, shape[1:2], shape[1:2]] for (shape,) in sides])
        for sides in (_SIDES, _SMALL_SIDES)
    ),
    Probe(
        lambda x, w, b: F.group_norm(x, 4, w, b),
        [[shape, shape[1:2], shape[1:2]] for (shape,) in _SIDES],
    ),
    Probe(partial(F.max_pool2d, kernel_size=2), _SIDES),
    Probe(partial(F.max_pool2d, kernel_size=3, stride=1, padding=1), _SIDES),
    Probe(partial(F.avg_pool2d, kernel_size=2), _SIDES),
    Probe(lambda x: F.adaptive_avg_pool2d(x, 1), _SIDES),
    Probe(lambda x: F.adaptive_avg_pool2d(x, 1), _SMALL_SIDES),
    Probe(partial(F.interpolate, scale_factor=2.0), _SIDES),
    Probe(partial(F.interpolate, scale_factor=2.0, mode="bilinear"), _SIDES),
    *(Probe(torch.mm, [[(n, k), (k, m)] for n, k, m in s]) for s in (_PRODUCTS, _OF_FEW_ROWS)),
    *(
        Probe(F.linear, [[(n, k), (m, k), (m,)] for n, k, m in sizes])
        for sizes in (_PRODUCTS, _OF_FEW_ROWS)
    ),
    Probe(
        _remembered,
        [[(t, n, d), (4 * d, d), (4 * d, d), (4 * d,), (4 * d,)] for t, n, d in _SEQUENCES],
    ),
    Probe(torch.bmm, [[(b, n, k), (b, k, n)] for b, n, k in _BATCHES]),
    Probe(F.scaled_dot_product_attention, [[shape] * 3 for shape in _HEADS]),
    *(
        Probe(_conv(window), _convolved(channels, window))
        for channels in (16, 32, 64, 256)
        for window in (1, 3)
    ),
    Probe(_conv(7, stride=2), [[(n, 3, side, side), (32, 3, 7, 7)] for n, side in _PICTURES], 1),
    *(
        Probe(_depthwise, [[(n, c, s, s), (c, 1, window, window)] for n, c, s in sizes])
        for window in (3, 5)
        for sizes in (_MAPS, _SMALL_MAPS)
    ),
    Probe(_conv(3, groups=4), [[(n, c, s, s), (c, c // 4, 3, 3)] for n, c, s in _MAPS]),
    Probe(
        partial(F.conv_transpose2d, stride=2),
        [[(n, c, s, s), (c, c // 2, 2, 2)] for n, c, s in _MAPS],
    ),
)


@dataclass
class Points:
    """Collects what is measured of kernels, by their names."""

    device: Device
    single: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    joint: list[tuple[list[KernelCost], float]] = field(default_factory=list)

    def take(self, kernels: list[KernelCost], seconds: float) -> None:
        if len(kernels) == 1:
            self._put(kernels[0], seconds)
        elif kernels:
            self.joint.append((kernels, seconds))

    def _put(self, kernel: KernelCost, seconds: float) -> None:
        ideal_s = kernel.ideal_s(self.device)
        if ideal_s > 0:
            self.single.setdefault(kernel.name, []).append((ideal_s, seconds))

    def found(self) -> KernelTimes:
        """Of kernels that were timed alone; of others what is left of a call without those: the
        longest of them took all of it."""
        known = KernelTimes.of(self.single, self.device)
        least_s = min(seconds for each in self.single.values() for _, seconds in each)
        for kernels, seconds in self.joint:
            unknown = [k for k in kernels if k.name not in known.points]
            if unknown:
                longest = max(unknown, key=lambda kernel: kernel.ideal_s(self.device))
                rest = [kernel for kernel in kernels if kernel is not longest]
                others_s = sum(map(known.seconds, rest))
                self._put(longest, max(seconds - others_s, least_s))
        return KernelTimes.of(self.single, self.device)


class Case:
    """A probe in one size, with what it takes and what was measured of it."""

    def __init__(self, probe: Probe, shapes: Sequence[tuple[int, ...]]) -> None:
        self.inputs = [torch.rand(shape).add_(0.5) for shape in shapes]
        self.leaves = self.inputs[probe.fixed :]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.run = probe.run
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        forward, backward = KernelCount(), KernelCount()
        with DispatchWatch(forward.saw):
            result = self.run(*self.inputs)
        self.gradient = torch.ones_like(result)
        with DispatchWatch(backward.saw):
            self._back(result)
        self.forward_kernels, self.backward_kernels = forward.kernels, backward.kernels

    def _back(self, result: Tensor) -> object:
        return torch.autograd.grad(result, self.leaves, self.gradient)

    def forward(self) -> Tensor:
        with torch.no_grad():
            self.inputs[0].mul_(1)  # as what comes before has just made it
        seconds, result = clocked(lambda: self.run(*self.inputs), _CPU)
        self.forward_s.append(seconds)
        return result

    def backward(self, result: Tensor) -> None:
        self.gradient.mul_(1)
        self.backward_s.append(clocked(lambda: self._back(result), _CPU)[0])

    def forget(self) -> None:
        self.forward_s.clear()
        self.backward_s.clear()

    def tell(self, points: Points, started_s: float) -> None:
        """Adds the medians, without what it takes to start a backward."""
        forward_s, backward_s = map(statistics.median, (self.forward_s, self.backward_s))
        points.take(self.forward_kernels, forward_s)
        points.take(self.backward_kernels, max(backward_s - started_s, started_s / 10))


def measured(device: Device) -> KernelTimes:
    """Seconds of every kernel by the roofline of a device, and as measured here."""
    points = Points(device)
    torch.manual_seed(0)
    started_s = started_seconds()
    for cases in rounds():
        for case in cases:
            case.tell(points, started_s)
    return points.found()


def rounds() -> Iterator[list[Case]]:
    """All probes of about one size, timed."""
    sizes = itertools.zip_longest(*(probe.shapes for probe in PROBES))
    for place, column in enumerate(sizes):
        pending = [(p, shapes) for p, shapes in zip(PROBES, column, strict=True) if shapes]
        while pending:
            cases: list[Case] = []
            while pending and sum(case.gradient.nbytes for case in cases) < _AT_ONCE:
                # Several: models have layers of a kind, and the next finds the code of the last.
                probe = pending.pop()
                cases.extend(Case(*probe) for _ in range(_LAYERS[place > 1]))
            _train(cases)
            for case in cases:
                case.forget()
            for _ in range(_TRIES[place > 1]):
                _train(cases)
            yield cases


def _train(cases: Sequence[Case]) -> None:
    """Times forward through all, then backward."""
    results = [case.forward() for case in cases]
    for case in reversed(cases):
        case.backward(results.pop())


def started_seconds() -> float:
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


_CPU = torch.device("cpu")

_AT_ONCE = 128 * 2**20
"""Bytes of results after which no more probes run together: more than caches hold."""

_TRIES, _LAYERS = (11, 5), (2, 1)
"""How often small probes run, and large ones; and how many of a kind one after another."""


def _main(given: str) -> None:
    flops, bandwidth, threads = json.loads(given)
    torch.set_num_threads(int(threads))
    keep_memory()
    print(json.dumps(measured(reference(flops, bandwidth)).to_fields()))


if __name__ == "__main__":
    _main(sys.argv[1])
