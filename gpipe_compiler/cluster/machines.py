"""Devices, the links between them, and clusters of both."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from gpipe_compiler.cluster.quantities import rate_text
from gpipe_compiler.errors import UsageError

MOST_DEVICES = 2048
"""Of a cluster: what plans hold of it grows with the square of their number."""


MARGIN = 0.02
"""The share by which GPUs may need more than is told: what convolutions take for a moment."""


class Arithmetic(Enum):
    """What a matrix product or a convolution is computed in.

    By default PyTorch multiplies fp32 matrices in fp32 proper, without tensor cores
    (`torch.backends.cuda.matmul.fp32_precision` is not "tf32"), but lets cuDNN run fp32
    convolutions and recurrent layers in TF32 (`torch.backends.cudnn.conv.fp32_precision` is).
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class Device:
    """One device that runs stages.

    Attributes:
        flops: arithmetic it sustains on large fp32 matrix products, FLOP/s.
        memory_bandwidth: bytes/s it sustains reading and writing memory.
        launch_s: seconds that any op costs, however small.
        half_flops: arithmetic on large matrix products in fp16 and bf16, FLOP/s; None where that
            is not known to be faster.
        tf32_flops: on fp32 convolutions, which may run in TF32; None where there is no TF32.
        bf16_flops: in bf16, where that differs from fp16.
        workspace: bytes that PyTorch takes for the matrix library of each thread that multiplies
            matrices; 0 on a processor, and where it is not known.
        kept_free: bytes of its memory that are no tensors', such as those of CUDA's context; 0 on a
            processor, and where it is not known.
        convolution_code: bytes of code that a processor's library writes for convolutions of each
            shape; 0 on a GPU, and where it is not known.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: int
    launch_s: float
    half_flops: float | None = None
    tf32_flops: float | None = None
    bf16_flops: float | None = None
    workspace: int = 0
    kept_free: int = 0
    convolution_code: int = 0

    @property
    def room(self) -> int:
        """Bytes for what PyTorch's allocator takes: what is kept free and a margin are not."""
        if not self.kept_free:
            return self.memory
        return max(0, math.floor((self.memory - self.kept_free) / (1 + MARGIN)))

    def needed(self, taken: int) -> int:
        """Bytes that its memory has to have for these of PyTorch's allocator, as in `room`."""
        return math.ceil(taken * (1 + MARGIN)) + self.kept_free if self.kept_free else taken

    def speed(self, arithmetic: Arithmetic) -> float:
        match arithmetic:
            case Arithmetic.FP16:
                return self.half_flops or self.flops
            case Arithmetic.BF16:
                return self.bf16_flops or self.half_flops or self.flops
            case Arithmetic.TF32:
                return self.tf32_flops or self.flops
            case Arithmetic.FP32:
                return self.flops


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two devices: bytes/s in each direction, and seconds before the first byte.

    Links that differ only in their name are equal.
    """

    bandwidth: float
    latency_s: float
    name: str = field(default="", compare=False)

    def seconds(self, size: float) -> float:
        """Time to move `size` bytes; nothing moves in no time."""
        return self.latency_s + size / self.bandwidth if size else 0.0


NO_LINK = Link(bandwidth=math.inf, latency_s=0.0)
"""What connects a device with itself."""


@dataclass(frozen=True)
class Cluster:
    """Devices, numbered from 0 host by host, and the links between any two of them.

    Attributes:
        link: between two devices of one host.
        network: between devices of different hosts; `link` unless given.
        hosts: the host of every device, counting up from 0; empty for a single host.
        exceptions: pairs of devices that another link connects, in both directions.
        endless: whether there are any number of further devices like the last one.
        pooled: whether the devices are processes that share one memory, so that the more there
            are of them, the less each holds.
        places: how many of the devices can compute at a time, where processes share a GPU or
            cores; None for all.
    """

    devices: tuple[Device, ...]
    link: Link
    network: Link | None = None
    hosts: tuple[int, ...] = ()
    exceptions: tuple[tuple[int, int, Link], ...] = ()
    endless: bool = False
    pooled: bool = False
    places: int | None = None

    @classmethod
    def of(cls, device: Device, link: Link) -> Cluster:
        """Any number of equal devices, with equal links between any two."""
        return cls((device,), link, endless=True)

    def sized(self, count: int) -> Cluster:
        """The same with at least `count` devices, where there are as many as anybody asks for.

        Raises:
            UsageError: for more than any cluster may have.
        """
        if not self.endless or len(self.devices) >= count:
            return self
        refuse_too_many(count)
        memory = sum(device.memory for device in self.devices)
        further = count - len(self.devices)
        hosts = (*self.hosts, *(self.hosts[-1],) * further) if self.hosts else ()
        devices = (*self.devices, *(self.devices[-1],) * further)
        if self.pooled:
            devices = tuple(replace(device, memory=memory // count) for device in devices)
        return replace(self, devices=devices, hosts=hosts)

    def part(self, slots: Sequence[int]) -> Cluster:
        """Some of the devices, renumbered in this order, on as many hosts as they are on."""
        place = {slot: index for index, slot in enumerate(slots)}
        hosts = {self.host(slot): None for slot in slots}
        number = {host: index for index, host in enumerate(hosts)}
        return Cluster(
            tuple(self.devices[slot] for slot in slots),
            self.link,
            self.network,
            tuple(number[self.host(slot)] for slot in slots) if len(hosts) > 1 else (),
            tuple(
                (place[one], place[other], link)
                for one, other, link in self.exceptions
                if one in place and other in place
            ),
        )

    def with_links(self, bandwidth: float | None, latency_s: float | None) -> Cluster:
        """The same with this bandwidth and latency on all links; None leaves them as they are."""
        if bandwidth is None and latency_s is None:
            return self

        def changed(link: Link) -> Link:
            return Link(
                link.bandwidth if bandwidth is None else bandwidth,
                link.latency_s if latency_s is None else latency_s,
                link.name if bandwidth is None else "",
            )

        return replace(
            self,
            link=changed(self.link),
            network=None if self.network is None else changed(self.network),
            exceptions=tuple((one, other, changed(link)) for one, other, link in self.exceptions),
        )

    def with_memory(self, size: int | None) -> Cluster:
        """The same with `size` bytes of memory on every device; None leaves them as they are."""
        if size is None:
            return self
        devices = tuple(replace(device, memory=size) for device in self.devices)
        return replace(self, devices=devices, pooled=False)

    def host(self, device: int) -> int:
        return self.hosts[device] if self.hosts else 0

    def between(self, one: int, other: int) -> Link:
        """The link that connects two devices; what stays on a device moves in no time."""
        if one == other:
            return NO_LINK
        link = self._exceptional.get((min(one, other), max(one, other)))
        if link is not None:
            return link
        if self.network is not None and self.host(one) != self.host(other):
            return self.network
        return self.link

    @cached_property
    def _exceptional(self) -> Mapping[tuple[int, int], Link]:
        """The link of every pair that has one of its own, the lower number first."""
        return {(min(one, other), max(one, other)): link for one, other, link in self.exceptions}

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The devices that differ from one another, in order of appearance."""
        return tuple(dict.fromkeys(self.devices))

    def __str__(self) -> str:
        """`2 hosts of 4 x H100, NVLink 450 GB/s, network 50 GB/s`."""
        return ", ".join([*_hosts_text(self), *_links_text(self)])


def refuse_too_many(count: int) -> None:
    """Raises UsageError for more devices than a cluster may have."""
    if count > MOST_DEVICES:
        raise UsageError(
            f"{count:,} devices are more than a cluster may have: {MOST_DEVICES:,}",
            hint="for data-parallel training, describe the devices of one pipeline",
        )


def _hosts_text(cluster: Cluster) -> list[str]:
    """The devices of the hosts: one phrase for consecutive hosts that are equal."""
    names: dict[int, list[str]] = {}
    for number, device in enumerate(cluster.devices):
        names.setdefault(cluster.host(number), []).append(device.name)
    held = list(map(_devices_text, names.values()))
    if len(held) == 1:
        return ["any number of " + cluster.devices[0].name] if _is_open(cluster) else held
    runs = ((text, len(list(group))) for text, group in itertools.groupby(held))
    return [f"{count} host{'s' if count > 1 else ''} of {text}" for text, count in runs]


def _is_open(cluster: Cluster) -> bool:
    return cluster.endless and len(cluster.devices) == 1


def _devices_text(names: Sequence[str]) -> str:
    runs = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    if len(runs) > len(set(names)):
        return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)
    return " and ".join(f"{count} x {name}" for name, count in runs)


_LINKS = "links"
"""What links within a host are called where they have no name."""


def _links_text(cluster: Cluster) -> list[str]:
    """What joins devices within hosts and between them."""
    sizes = Counter(map(cluster.host, range(len(cluster.devices)))).values()
    within = sum(size * (size - 1) // 2 for size in sizes)
    between = len(cluster.devices) * (len(cluster.devices) - 1) // 2 - within
    inner, outer = Counter[Link](), Counter[Link]()
    for one, other, link in cluster.exceptions:
        (inner if cluster.host(one) == cluster.host(other) else outer)[link] += 1
    return [
        *_joins(cluster.link, within or int(_is_open(cluster)), inner, _LINKS),
        *_joins(cluster.network or cluster.link, between, outer, "network"),
    ]


def _joins(usual: Link, pairs: int, special: Counter[Link], word: str) -> list[str]:
    """The links of `pairs` pairs: the usual one, then others with the number of their pairs."""
    rest = pairs - special.total()
    links = [*([(usual, rest)] if rest > 0 else []), *special.most_common()]
    texts = []
    for index, (link, count) in enumerate(links):
        if index > 0:
            lead = f"{count} pair{'s' if count > 1 else ''} {link.name}".strip()
        else:
            lead = link.name if link.name and word == _LINKS else word
        texts.append(f"{lead} {rate_text(link.bandwidth)}")
    return texts
