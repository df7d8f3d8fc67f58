"""What was measured of this machine, as a table and as a file for `--cluster`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.table import Table

from gpipe_compiler.cluster import is_host
from gpipe_compiler.cluster.cache import folder
from gpipe_compiler.cluster.machines import Arithmetic, Cluster, Device, Link
from gpipe_compiler.passes.kernel_times import KernelTimes
from gpipe_compiler.report.terminal import pairs_table, table_of
from gpipe_compiler.text.units import format_bytes, format_seconds


def show_machine(cluster: Cluster, link: Link | None) -> Table:
    """The figures of a device, and of the link between two.

    Args:
        cluster: of this machine (`cluster.local`).
        link: as measured; None where there is one device.
    """
    device = cluster.devices[0]
    places = cluster.places or 1
    shared = f", shared by {places}" if cluster.pooled and places > 1 else ""
    rows = [
        ("devices", f"{places} x {device.name}"),
        *((a.value, f"{s / 1e12:.3g} TFLOP/s in large products") for a, s in _speeds(device)),
        ("memory", f"{format_bytes(device.memory)}{shared}"),
        ("bandwidth", f"{device.memory_bandwidth / 1e9:.3g} GB/s of memory"),
        ("launch", f"{format_seconds(device.launch_s)} for any op, however small"),
    ]
    if device.kept_free and is_host(device):
        rows.append(("process", f"{format_bytes(device.kept_free)} before it holds a model"))
    elif device.kept_free:
        rows.append(("kept free", f"{format_bytes(device.kept_free)}: context, communication"))
        rows.append(("workspace", f"{format_bytes(device.workspace)} of the matrix library"))
    if link is not None:
        moved = f"{link.bandwidth / 1e9:.3g} GB/s after {format_seconds(link.latency_s)}"
        rows.append(("link", f"{moved} ({link.name})"))
    return pairs_table("this machine, measured now", rows)


def kernel_table(times: KernelTimes) -> Table:
    """How many times their roofline kernels take, from the smallest to the largest that were
    timed."""
    rows = []
    for name, points in sorted(times.points.items()):
        (small_s, small), (large_s, large) = points[0], points[-1]
        rows.append(
            {
                "kernel": name,
                "smallest": format_seconds(small),
                "of its roofline": f"{small / small_s:.3g}",
                "largest": format_seconds(large),
                "of its": f"{large / large_s:.3g}",
            }
        )
    title = f"kernels as they were timed (kept in {folder()})"
    return table_of(title, rows, words={"kernel"}, what="kernels")


def machine_file(cluster: Cluster, link: Link | None) -> str:
    """The same as a cluster file: plans made with it do not change with what is measured next.

    Devices that share the memory of a host have equal parts of it, and are called what this machine
    is called, so that `--cost measured` knows them.
    """
    device = cluster.devices[0]
    places = cluster.places or 1
    memory = device.memory // places if cluster.pooled else device.memory
    speeds = ", ".join(f"{a.value} = {s:.4g}" for a, s in _speeds(device))
    kept = {
        "kept_free": device.kept_free,
        "workspace": device.workspace,
        "convolution_code": device.convolution_code,
    }
    lines = [
        "# What gpipe-inspect machine measured, in bytes, bytes/s, seconds and FLOP/s.",
        f"[devices.{json.dumps(device.name)}]",
        f"memory = {memory}",
        *(f"{name} = {size}" for name, size in kept.items() if size),
        f"memory_bandwidth = {device.memory_bandwidth:.4g}",
        f"flops = {{ {speeds} }}",
        f"launch = {device.launch_s:.4g}",
    ]
    if link is not None:
        lines.append(
            f"link = {{ bandwidth = {link.bandwidth:.4g}, latency = {link.latency_s:.4g} }}"
        )
    lines += ["", "[[hosts]]", f"devices = {json.dumps(f'{places}x{device.name}')}", ""]
    return "\n".join(lines)


def _speeds(device: Device) -> Iterator[tuple[Arithmetic, float]]:
    """FLOP/s by arithmetic, as far as they are known to differ from fp32's."""
    for arithmetic in Arithmetic:
        speed = device.speed(arithmetic)
        if arithmetic is Arithmetic.FP32 or speed != device.flops:
            yield arithmetic, speed
