"""This machine as a cluster, measured: its speed in well under a second, its links in a few.

`python -m gpipe_compiler.cluster.local STORE TIMEOUT RANK` is one of the two processes between
which a link is measured.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from gpipe_compiler.cluster.cache import kept
from gpipe_compiler.cluster.catalogue import (
    BUILT_IN,
    GLOO,
    KEPT_FREE,
    PCIE4,
    Card,
    workspace_of,
)
from gpipe_compiler.cluster.hosts import HOST_NAME
from gpipe_compiler.cluster.machines import Cluster, Device, Link
from gpipe_compiler.errors import UsageError
from gpipe_compiler.runtime.core.devices import gpu_count
from gpipe_compiler.runtime.core.distributed import Network

T = TypeVar("T")

SMALL, LARGE = 4 * 2**10, 16 * 2**20
"""Bytes that latency and bandwidth are measured with."""

_TIMEOUT_S = 60.0


def local_cluster(link: Link | None = None) -> Cluster:
    """The devices of this machine: its GPUs, or else processes on its processor.

    Two or more GPUs are what there is. A single GPU, as a processor, stands for any number of
    devices like it, which share its memory and its time (`Cluster.pooled`, `Cluster.places`).

    A package runs as threads of one process and as processes under torchrun alike; unless another
    `link` is given, it is that of the slower way, so that the cut holds for both.
    """
    if not gpu_count():
        places = max(1, core_count() // torch.get_num_threads())
        return Cluster((this_machine(),), link or GLOO, endless=True, pooled=True, places=places)
    devices = _gpus()
    if len(devices) > 1:
        return Cluster(devices, link or PCIE4, places=len(devices))
    return Cluster(devices, link or PCIE4, endless=True, pooled=True, places=1)


def core_count() -> int:
    return len(os.sched_getaffinity(0))


def local_card() -> Card:
    """A device of this machine, with what joins it to others."""
    link = PCIE4 if gpu_count() else GLOO
    return Card(this_machine(), link, link)


def this_machine() -> Device:
    """One device of this machine, measured.

    The first GPU where there is one; otherwise the processor, with as many threads as torch is set
    to use (`torch.get_num_threads()`), as that is what one stage gets. Measured are products of
    two matrices and a copy, the best of a few tries, so that a busy machine shows its speed and
    not its load. Products are in fp32 as torch is set to compute them, not in TF32 by default; on
    a GPU also in 16 bits, and as a convolution, which may be in TF32.
    """
    if gpu_count():
        return _gpus()[0]
    return _measure(torch.device("cpu"))


def machine_name() -> str:
    return torch.cuda.get_device_name(0) if gpu_count() else HOST_NAME


def is_here(device: Device) -> bool:
    """Whether this machine has such a device: by its name, as measured or as built in."""
    return device.name in (machine_name(), built_in_name(machine_name()))


def built_in_name(full: str) -> str | None:
    """The built-in device that a GPU's full name means, such as `NVIDIA A100-SXM4-40GB`, if any."""
    words = _words(full)
    fitting = [c.device.name for c in BUILT_IN.values() if _words(c.device.name) <= words]
    return max(fitting, key=lambda name: len(_words(name)), default=None)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z0-9]+", name.lower()))


def _gpus() -> tuple[Device, ...]:
    """The GPUs of this machine; of those that are alike, the first is measured."""
    measured: dict[tuple[str, int], Device] = {}
    found = []
    for index in range(gpu_count()):
        gpu = torch.device("cuda", index)
        key = torch.cuda.get_device_name(gpu), _memory(gpu)
        if key not in measured:
            measured[key] = _measure(gpu)
        found.append(measured[key])
    return tuple(found)


def _measure(device: torch.device) -> Device:
    on_gpu = device.type == "cuda"
    side, length = (4096, 2**28) if on_gpu else (512, 2**24)
    source, target = torch.ones(length, device=device), torch.empty(length, device=device)
    one = torch.ones(1, device=device)
    process = {"bytes": KEPT_FREE, "convolution": 0} if on_gpu else _process(anew=False)
    with torch.no_grad():
        copy_s = best_seconds(lambda: target.copy_(source), device)
        launch_s = best_seconds(lambda: [one.add_(1) for _ in range(100)], device) / 100
        flops = _product_flops(side, torch.float32, device)
        half = _product_flops(2 * side, torch.float16, device) if on_gpu else None
        bf16 = _bf16_flops(2 * side, flops, device) if on_gpu else None
        convolved = _convolution_flops(device) if on_gpu else None
    return Device(
        torch.cuda.get_device_name(device) if on_gpu else HOST_NAME,
        flops=flops,
        memory_bandwidth=2 * length * source.element_size() / copy_s,
        memory=_memory(device),
        launch_s=launch_s,
        half_flops=half,
        tf32_flops=convolved,
        bf16_flops=bf16,
        workspace=_workspace(device) if on_gpu else 0,
        kept_free=process["bytes"],
        convolution_code=process["convolution"],
    )


def process_bytes(*, anew: bool = False) -> int:
    """Bytes that a process of a package takes on this machine before it holds a model: Python,
    torch, and the code of common kernels. Measured once; 0 where it cannot be, as on systems other
    than Linux."""
    return _process(anew=anew)["bytes"]


def _process(*, anew: bool) -> Mapping[str, int]:
    """The same, and what a convolution of one more shape adds."""
    return {"bytes": 0, "convolution": 0, **kept("process", _measured_process, anew=anew)}


def _measured_process() -> Mapping[str, int]:
    here = Path(__file__).parent
    command = [sys.executable, str(here / "bare_process.py"), str(here.parent / "runtime")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        whole, each = map(int, done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {"bytes": whole, "convolution": each} if whole else {}


def _workspace(gpu: torch.device) -> int:
    rocm = torch.version.hip is not None
    return workspace_of(torch.cuda.get_device_capability(gpu), rocm=rocm)


def _product_flops(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.ones(side, side, device=device, dtype=dtype)
    return 2 * side**3 / best_seconds(lambda: torch.mm(a, a), device)


def _bf16_flops(side: int, fp32_flops: float, gpu: torch.device) -> float:
    """A GPU without bf16 runs it in fp32, if at all."""
    with torch.cuda.device(gpu):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return fp32_flops
    return _product_flops(side, torch.bfloat16, gpu)


def _convolution_flops(device: torch.device) -> float:
    """Of a 3x3 convolution of 256 channels over 64 images of 56x56."""
    images, channels, width = 64, 256, 56
    x = torch.ones(images, channels, width, width, device=device)
    weight = torch.ones(channels, channels, 3, 3, device=device)
    seconds = best_seconds(lambda: torch.conv2d(x, weight, padding=1), device)
    return 2 * images * width**2 * channels**2 * 9 / seconds


def clock_of(device: torch.device) -> Callable[[], float]:
    """Gives seconds: of this thread where it computes alone, so that other work on the machine does
    not count; else those of the clock."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def best_seconds(work: Callable[[], object], device: torch.device, tries: int = 5) -> float:
    """The shortest of several runs, after one that does not count."""
    return min(_runs(work, device, tries))


def typical_seconds(work: Callable[[], object], device: torch.device, tries: int = 5) -> float:
    """The median of several runs, after one that does not count."""
    return statistics.median(_runs(work, device, tries))


def _runs(work: Callable[[], object], device: torch.device, tries: int) -> list[float]:
    work()
    return [clocked(work, device)[0] for _ in range(tries)]


def clocked(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """The seconds of a run, with all that it starts on the device, and what it returns."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    clock = clock_of(device)
    wait()
    start = clock()
    returned = work()
    wait()
    return clock() - start, returned


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def timed_link(timeout_s: float = _TIMEOUT_S) -> Link:
    """The link between two devices of this machine, as packages under torchrun use it.

    Between GPUs, copies from the first to the second; with one GPU there is nothing to measure.
    Without GPUs, messages between two processes over gloo.

    Raises:
        UsageError: when there is only one GPU, or the processes do not find each other.
    """
    gpus = gpu_count()
    if gpus == 1:
        raise UsageError(
            "this machine has one GPU: there is no link to measure",
            hint="name devices and links, such as --devices 4xH200, or say --devices local",
        )
    small_s, large_s = _between_gpus() if gpus else _between_processes(timeout_s)
    return link_of(small_s, large_s, "copies" if gpus else "gloo")


def link_of(small_s: float, large_s: float, name: str) -> Link:
    """The link that moves `SMALL` and `LARGE` bytes in these times."""
    # A machine that was disturbed in between may have moved the small ones more slowly.
    bandwidth = (LARGE - SMALL) / max(large_s - small_s, large_s / 10)
    return Link(bandwidth, max(0.0, small_s - SMALL / bandwidth), name)


def _between_gpus() -> tuple[float, float]:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)

    def seconds(size: int) -> float:
        source = torch.ones(size, dtype=torch.uint8, device=one)
        target = torch.empty(size, dtype=torch.uint8, device=other)

        def copy() -> None:
            target.copy_(source)
            torch.cuda.synchronize(other)

        return best_seconds(copy, one, tries=10)

    return seconds(SMALL), seconds(LARGE)


def _between_processes(timeout_s: float) -> tuple[float, float]:
    """Seconds that two processes take for `SMALL` and `LARGE` bytes, one way."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "gpipe_compiler.cluster.local",
            str(Path(folder, "store")),
            str(timeout_s),
        ]
        pipe = subprocess.PIPE
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=pipe, stderr=pipe, text=True)
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=timeout_s) for rank in ranks]
        except subprocess.TimeoutExpired:
            said = []
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if not said or any(rank.returncode for rank in ranks):
        complaints = [complaint.strip().splitlines()[-1:] for _, complaint in said]
        why = next((lines[0] for lines in complaints if lines), f"nothing within {timeout_s:.0f} s")
        raise UsageError(
            f"the link between two processes cannot be measured: {why}",
            hint="say --devices local, with --bandwidth and --latency where they are known",
        )
    small_s, large_s = map(float, said[0][0].split())
    return small_s, large_s


def _time_messages(store: Path, timeout_s: float, rank: int) -> None:
    """One of two processes that send each other messages as the runtime does; rank 0 prints."""
    # Not by a file:// address, in which torch would not find blanks again.
    found = dist.FileStore(str(store), 2)  # type: ignore[attr-defined]  # torch lists no stores
    dist.init_process_group(
        "gloo", store=found, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s)
    )
    network = Network.of_all(torch.device("cpu"), timeout_s)
    seconds = [_one_way(network, SMALL, tries=200), _one_way(network, LARGE, tries=8)]
    if rank == 0:
        print(*seconds)
    dist.destroy_process_group()


def _one_way(network: Network, size: int, tries: int) -> float:
    """Half the shortest time in which a message went there and back."""
    other = 1 - network.rank
    payload = torch.ones(size, dtype=torch.uint8)
    best = float("inf")
    for tag in range(tries):
        buffer = torch.empty(size, dtype=torch.uint8)
        expected = network.receive(buffer, other, tag)
        start = time.perf_counter()
        if network.rank == 1:
            network.finish(expected, "at the first half")
        network.finish(network.send(payload, other, tag), "sending")
        if network.rank == 0:
            network.finish(expected, "at the second half")
        best = min(best, time.perf_counter() - start)
    return best / 2


if __name__ == "__main__":
    _time_messages(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
