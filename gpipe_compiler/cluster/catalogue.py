"""Built-in devices and links: what data sheets say of common GPUs.

Speeds are peaks, which large products come near and small ones do not; where times have to be
right, describe the device by what it was measured to sustain. All are for dense matrices: data
sheets from the Ampere generation on print twice as much for sparse ones. In fp32 they are those
outside tensor cores, where PyTorch multiplies fp32 matrices by default; TF32 is for convolutions
(`Arithmetic`). GPUs before Ampere have no bf16 in their tensor cores, so they run it at fp32's
speed at best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpipe_compiler.cluster.machines import Device, Link
from gpipe_compiler.errors import UsageError

# Threads of one process hand tensors over; only waking the other thread takes time.
IN_PROCESS = Link(bandwidth=1e12, latency_s=2e-5, name="threads")
# Two processes on one host, gloo over loopback: 0.23 ms for 4 KB, 5.3 ms for 16 MB (measured).
GLOO = Link(bandwidth=3e9, latency_s=2.3e-4, name="gloo")
# PCI Express x16 in practice; on paper 15.75, 31.5 and 63 GB/s.
PCIE3 = Link(bandwidth=12e9, latency_s=1e-5, name="PCIe")
PCIE4 = Link(bandwidth=25e9, latency_s=1e-5, name="PCIe")
PCIE5 = Link(bandwidth=50e9, latency_s=1e-5, name="PCIe")
# NVLink of the V100, A100, H100 and H200, B200: half of what both directions have together.
NVLINK2 = Link(bandwidth=150e9, latency_s=1e-5, name="NVLink")
NVLINK3 = Link(bandwidth=300e9, latency_s=1e-5, name="NVLink")
NVLINK4 = Link(bandwidth=450e9, latency_s=1e-5, name="NVLink")
NVLINK5 = Link(bandwidth=900e9, latency_s=1e-5, name="NVLink")
# Between any two MI300X of a host: 128 GB/s, both directions together.
XGMI = Link(bandwidth=64e9, latency_s=1e-5, name="Infinity Fabric")

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "pcie3": PCIE3,
        "pcie4": PCIE4,
        "pcie5": PCIE5,
        "nvlink2": NVLINK2,
        "nvlink3": NVLINK3,
        "nvlink4": NVLINK4,
        "nvlink5": NVLINK5,
        "gloo": GLOO,
    }
)
"""Links by name."""


@dataclass(frozen=True, slots=True)
class Card:
    """A device, and what joins it to others in its host.

    Attributes:
        link: to devices of its kind; None where that is not known.
        bus: to devices of other kinds, where theirs is no slower; None where that is not known.
    """

    device: Device
    link: Link | None
    bus: Link | None


_GB = 10**9
_LAUNCH_S = 5e-6
"""What launching a kernel from PyTorch costs on a GPU when nothing else hides it."""


_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
_LARGE_WORKSPACE = 32 * 2**20
_MI300_WORKSPACE = 128 * 2**20
"""Bytes of `Device.workspace`, unless CUBLAS_WORKSPACE_CONFIG says otherwise: those for GPUs in
general, from Hopper on, and AMD's (`parseChosenWorkspaceSize` in PyTorch's
ATen/cuda/CublasHandlePool.cpp)."""

KEPT_FREE = 750 * 10**6 + 256 * 2**20
"""Bytes of `Device.kept_free` of GPUs. CUDA's context with the kernels that PyTorch loads: 0.5 to
0.74 GB of a process, as was measured on an H100 with PyTorch 2.11. And NCCL's buffers: 4 MiB
(NCCL_BUFFSIZE) of 16 channels to and from two neighbours."""

_HOPPER_MAJOR = 9
_MI300 = (9, 4)


def workspace_of(capability: tuple[int, int], *, rocm: bool) -> int:
    """Bytes of `Device.workspace` by the compute capability of a GPU, as PyTorch chooses them."""
    if rocm:
        return _MI300_WORKSPACE if capability >= _MI300 else _LARGE_WORKSPACE
    return _LARGE_WORKSPACE if capability[0] >= _HOPPER_MAJOR else _WORKSPACE


def _gpu(
    name: str,
    memory_gb: int,
    bandwidth_gb: float,
    teraflops: Mapping[str, float],
    workspace: int = _WORKSPACE,
) -> Device:
    """A GPU by the figures of its data sheet: GB, GB/s and TFLOP/s by arithmetic."""
    flops = {arithmetic: float(f"{speed}e12") for arithmetic, speed in teraflops.items()}
    return Device(
        name,
        flops["fp32"],
        bandwidth_gb * 1e9,
        memory_gb * _GB,
        _LAUNCH_S,
        half_flops=flops.get("fp16"),
        tf32_flops=flops.get("tf32"),
        bf16_flops=flops.get("bf16"),
        workspace=workspace,
        kept_free=KEPT_FREE,
    )


def _without_bf16(fp32: float, fp16: float) -> dict[str, float]:
    return {"fp32": fp32, "fp16": fp16, "bf16": fp32}


_HOPPER = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4}
_HOPPER_PCIE = {"fp32": 51.2, "tf32": 378, "fp16": 756}
_BLACKWELL = {"fp32": 75, "tf32": 1125, "fp16": 2250}
_MI300X = {"fp32": 163.4, "fp16": 1307.4}
_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312}
_V100 = _without_bf16(15.7, 125)

BUILT_IN: Mapping[str, Card] = MappingProxyType(
    {
        "b200": Card(_gpu("B200", 180, 8000, _BLACKWELL, _LARGE_WORKSPACE), NVLINK5, PCIE5),
        "h200": Card(_gpu("H200", 141, 4800, _HOPPER, _LARGE_WORKSPACE), NVLINK4, PCIE5),
        "h100": Card(_gpu("H100", 80, 3350, _HOPPER, _LARGE_WORKSPACE), NVLINK4, PCIE5),
        "h100pcie": Card(_gpu("H100 PCIe", 80, 2000, _HOPPER_PCIE, _LARGE_WORKSPACE), PCIE5, PCIE5),
        "a100": Card(_gpu("A100", 80, 2039, _A100), NVLINK3, PCIE4),
        "a10040gb": Card(_gpu("A100 40GB", 40, 1555, _A100), NVLINK3, PCIE4),
        "v100": Card(_gpu("V100", 32, 900, _V100), NVLINK2, PCIE3),
        "v10016gb": Card(_gpu("V100 16GB", 16, 900, _V100), NVLINK2, PCIE3),
        "p40": Card(_gpu("P40", 24, 346, {"fp32": 11.76}), PCIE3, PCIE3),
        "t4": Card(_gpu("T4", 16, 320, _without_bf16(8.1, 65)), PCIE3, PCIE3),
        "l4": Card(_gpu("L4", 24, 300, {"fp32": 30.3, "tf32": 60, "fp16": 121}), PCIE4, PCIE4),
        "l40s": Card(_gpu("L40S", 48, 864, {"fp32": 91.6, "tf32": 183, "fp16": 362}), PCIE4, PCIE4),
        "a10g": Card(_gpu("A10G", 24, 600, {"fp32": 35, "tf32": 35, "fp16": 70}), PCIE4, PCIE4),
        "rtx4090": Card(
            _gpu("RTX 4090", 24, 1008, {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2}), PCIE4, PCIE4
        ),
        "rtx3090": Card(
            _gpu("RTX 3090", 24, 936, {"fp32": 35.6, "tf32": 35.6, "fp16": 71}), PCIE4, PCIE4
        ),
        "mi300x": Card(
            _gpu("MI300X", 192, 5300, _MI300X, _MI300_WORKSPACE),
            XGMI,
            PCIE5,
        ),
    }
)
"""Devices by name, in lower case and without blanks and hyphens.

Sources, NVIDIA's unless another is named. B200: data sheet of the DGX B200, an eighth of it. H200
(SXM), H100 (SXM and PCIe), A100 (SXM, 80 and 40 GB), V100 (SXM2), L4, L40S: their data sheets; of
the H100 PCIe also the Hopper architecture white paper. P40: data sheet; its fp16 is slower than
fp32, in which PyTorch's products then run. T4: data sheet, bandwidth from the Turing architecture
white paper. A10G: data sheet, as Amazon's G5 instances have it. RTX 4090, RTX 3090: white papers of
the Ada and GA102 architectures, 16 bits adding up in fp32. MI300X: AMD's data sheet; PyTorch on
ROCm does not use its TF32.
"""

DEFAULT_HOST = Device("host", flops=5e10, memory_bandwidth=1e10, memory=16 * 2**30, launch_s=5e-6)
"""A modest processor core, for plans that must not depend on the machine they are made on."""


def built_in(name: str) -> Card:
    """The device of this name, however it is spelled: `RTX 4090`, `rtx-4090`.

    Raises:
        UsageError: when there is none.
    """
    found = BUILT_IN.get(plain(name))
    if found is None:
        raise UsageError(f"no device is known as {name!r}", hint=known_devices())
    return found


def known_devices() -> str:
    names = ", ".join(entry.device.name for entry in BUILT_IN.values())
    return (
        f"known are local and measured (this machine), {names}; any other device can be described "
        "in a file for --cluster"
    )


def plain(name: str) -> str:
    """A name as the tables here have it."""
    return "".join(letter for letter in name.lower() if letter not in " -_")
