"""The machines a plan is for: devices (speed, memory) and the links between them."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from gpipe_compiler.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One device that runs stages.

    Attributes:
        flops: arithmetic it sustains on large fp32 matrix products, FLOP/s.
        memory_bandwidth: bytes/s it sustains reading and writing memory.
        memory: bytes it holds.
        launch_s: seconds that any op costs, however small.
        half_flops: arithmetic on large matrix products in bf16 and fp16, FLOP/s; None where that
            is not known to be faster.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: int
    launch_s: float
    half_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two devices: bytes/s in each direction, and seconds before the first byte."""

    bandwidth: float
    latency_s: float

    def seconds(self, size: float) -> float:
        """Time to move `size` bytes; nothing moves in no time."""
        return self.latency_s + size / self.bandwidth if size else 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, numbered from 0 host by host, and the links between any two of them.

    Attributes:
        link: between two devices of one host.
        network: between devices of different hosts; `link` unless given.
        hosts: the host of every device, counting up from 0; empty for a single host.
        exceptions: pairs of devices that another link connects, in both directions.
        endless: whether there are as many more like the last device as anybody asks for.
    """

    devices: tuple[Device, ...]
    link: Link
    network: Link | None = None
    hosts: tuple[int, ...] = ()
    exceptions: tuple[tuple[int, int, Link], ...] = ()
    endless: bool = False

    @classmethod
    def of(cls, device: Device, link: Link) -> Cluster:
        """Any number of equal devices, with equal links between any two."""
        return cls((device,), link, endless=True)

    def sized(self, count: int) -> Cluster:
        """The same with at least `count` devices, where there are as many as anybody asks for."""
        if not self.endless or len(self.devices) >= count:
            return self
        further = count - len(self.devices)
        hosts = (*self.hosts, *(self.hosts[-1],) * further) if self.hosts else ()
        return replace(self, devices=(*self.devices, *(self.devices[-1],) * further), hosts=hosts)

    def host(self, device: int) -> int:
        """The host of a device."""
        return self.hosts[device] if self.hosts else 0

    def between(self, one: int, other: int) -> Link:
        """The link that connects two devices; what stays on a device moves in no time."""
        if one == other:
            return NO_LINK
        for first, second, link in self.exceptions:
            if {first, second} == {one, other}:
                return link
        if self.network is not None and self.host(one) != self.host(other):
            return self.network
        return self.link

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The devices that differ from one another, in order of appearance."""
        return tuple(dict.fromkeys(self.devices))


NO_LINK = Link(bandwidth=math.inf, latency_s=0.0)
"""What connects a device with itself."""

_GB = 10**9
_LAUNCH_S = 5e-6
"""What launching a kernel from PyTorch costs on a GPU when nothing else hides it."""

IN_PROCESS = Link(bandwidth=1e12, latency_s=2e-5)
"""Threads of one process hand tensors over; only waking the other thread takes time."""
GLOO = Link(bandwidth=3e9, latency_s=2.3e-4)
"""Two processes on one host, gloo over loopback: 0.23 ms for 4 KB, 5.3 ms for 16 MB (measured)."""
PCIE3 = Link(bandwidth=12e9, latency_s=1e-5)
"""PCI Express 3.0 x16: 15.75 GB/s on paper, about 12 in practice."""
PCIE4 = Link(bandwidth=25e9, latency_s=1e-5)
"""PCI Express 4.0 x16: 31.5 GB/s on paper, about 25 in practice."""
NVLINK2 = Link(bandwidth=150e9, latency_s=1e-5)
"""NVLink of the V100: 300 GB/s, both directions together."""
NVLINK3 = Link(bandwidth=300e9, latency_s=1e-5)
"""NVLink of the A100: 600 GB/s, both directions together."""
NVLINK4 = Link(bandwidth=450e9, latency_s=1e-5)
"""NVLink of the H100 and H200: 900 GB/s, both directions together."""

CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        "h200": Cluster.of(Device("H200", 66.9e12, 4.8e12, 141 * _GB, _LAUNCH_S, 989e12), NVLINK4),
        "h100": Cluster.of(Device("H100", 66.9e12, 3.35e12, 80 * _GB, _LAUNCH_S, 989e12), NVLINK4),
        "a100": Cluster.of(Device("A100", 19.5e12, 2.039e12, 80 * _GB, _LAUNCH_S, 312e12), NVLINK3),
        "v100": Cluster.of(Device("V100", 15.7e12, 0.9e12, 32 * _GB, _LAUNCH_S, 125e12), NVLINK2),
        "p40": Cluster.of(Device("P40", 11.76e12, 0.346e12, 24 * _GB, _LAUNCH_S), PCIE3),
    }
)
"""Built-in machines by name: fp32 without tensor cores, 16 bits with them (dense), bandwidth and
memory as NVIDIA's data sheets give them for the SXM modules (the P40 is a PCIe card, and slow in
16 bits)."""

DEFAULT_HOST = Device("host", flops=5e10, memory_bandwidth=1e10, memory=16 * 2**30, launch_s=5e-6)
"""A modest processor core, for plans that must not depend on the machine they are made on."""


def named_cluster(name: str) -> Cluster:
    """The built-in cluster of this name, in any case, or `local` for this machine.

    Raises:
        UsageError: when there is none.
    """
    if name.lower() == "local":
        return local_cluster()
    try:
        return CLUSTERS[name.lower()]
    except KeyError:
        raise UsageError(
            f"no device is known as {name!r}",
            hint=f"known are local, {', '.join(CLUSTERS)}",
        ) from None


def local_cluster() -> Cluster:
    """Stages on this machine: on its GPUs, or on its processor.

    A package runs as threads of one process and as processes under torchrun alike; the link is that
    of the slower way, so that the cut holds for both.
    """
    return Cluster.of(this_machine(), PCIE4 if torch.cuda.is_available() else GLOO)


def this_machine() -> Device:
    """One device of this machine, its speed measured in well under a second.

    The first GPU where there is one; otherwise the processor, with as many threads as torch is set
    to use (`torch.get_num_threads()`), as that is what one stage gets. Measured are a product of
    two matrices and a copy, the best of a few tries, so that a busy machine shows its speed and
    not its load.
    """
    if torch.cuda.is_available():
        return _measure(torch.device("cuda", 0))
    return _measure(torch.device("cpu"))


def _measure(device: torch.device) -> Device:
    on_gpu = device.type == "cuda"
    side, length = (8192, 2**28) if on_gpu else (512, 2**22)
    a = torch.ones(side, side, device=device)
    half = a.bfloat16() if on_gpu else None
    source, target = torch.ones(length, device=device), torch.empty(length, device=device)
    one = torch.ones(1, device=device)
    with torch.no_grad():
        product_s = _best_seconds(lambda: torch.mm(a, a), device)
        half_s = None if half is None else _best_seconds(lambda: torch.mm(half, half), device)
        copy_s = _best_seconds(lambda: target.copy_(source), device)
        launch_s = _best_seconds(lambda: [one.add_(1) for _ in range(100)], device) / 100
    return Device(
        torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} host",
        flops=2 * side**3 / product_s,
        memory_bandwidth=2 * length * source.element_size() / copy_s,
        memory=_memory(device),
        launch_s=launch_s,
        half_flops=None if half_s is None else 2 * side**3 / half_s,
    )


def _best_seconds(work: Callable[[], object], device: torch.device, tries: int = 5) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    best = float("inf")
    for _ in range(tries):
        wait()
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
