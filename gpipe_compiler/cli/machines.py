"""The arguments of gpipe-compile that say what machines there are."""

from __future__ import annotations

import argparse

from gpipe_compiler.cluster import BUILT_IN, Cluster, devices_named, read_cluster
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, TIME, Quantity
from gpipe_compiler.runtime.core.typed import path


def machine_arguments(group: argparse._ArgumentGroup) -> None:
    """Devices and links: by name, from a file, or this machine's; some of it replaced."""
    machines = group.add_mutually_exclusive_group()
    machines.add_argument(
        "--devices",
        metavar="NxNAME",
        default="local",
        help="what there is to run on, in one host: 4xH200, or H200 for as many as needed, or "
        "2xV100,2xP40; local is this machine, measured now, and measured the same with its links "
        "(default %(default)s); known are "
        + ", ".join(entry.device.name for entry in BUILT_IN.values()),
    )
    machines.add_argument(
        "--cluster",
        metavar="FILE",
        type=path,
        help="a description of hosts, devices and links, as the .toml files in examples/clusters",
    )
    group.add_argument(
        "--bandwidth",
        metavar="B/s",
        type=_bandwidth,
        help="bytes a second of every link between two devices, such as 12.5G, 25GB/s, 100Gb/s",
    )
    group.add_argument(
        "--latency",
        metavar="S",
        type=seconds,
        help="seconds before the first byte, on every link, such as 20us",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=_memory,
        help="what every device holds, such as 16GiB; a plan that does not fit is then refused "
        "(default: as it is described)",
    )


def cluster_asked(arguments: argparse.Namespace) -> Cluster:
    """The cluster that these arguments describe.

    Raises:
        UsageError: for devices that are not known, or a file that describes no cluster.
    """
    if arguments.cluster is None:
        cluster = devices_named(arguments.devices)
    else:
        cluster = read_cluster(arguments.cluster)
    linked = cluster.with_links(arguments.bandwidth, arguments.latency)
    return linked.with_memory(arguments.memory)


def seconds(text: str) -> float:
    """The type of an argument that is a time."""
    return _quantity(text, TIME)


def _bandwidth(text: str) -> float:
    return _quantity(text, BANDWIDTH)


def _memory(text: str) -> int:
    return int(_quantity(text, SIZE))


def _quantity(text: str, quantity: Quantity) -> float:
    try:
        return quantity.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
