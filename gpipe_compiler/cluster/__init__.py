"""The machines a plan is for: devices (speed, memory) and the links between them.

What measures this machine needs torch, and is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpipe_compiler.cluster.catalogue import (
    BUILT_IN,
    DEFAULT_HOST,
    GLOO,
    IN_PROCESS,
    LINKS,
    NVLINK2,
    NVLINK3,
    NVLINK4,
    NVLINK5,
    PCIE3,
    PCIE4,
    PCIE5,
    Card,
    built_in,
)
from gpipe_compiler.cluster.file import read_cluster
from gpipe_compiler.cluster.machines import NO_LINK, Arithmetic, Cluster, Device, Link
from gpipe_compiler.cluster.words import devices_named

if TYPE_CHECKING:
    from gpipe_compiler.cluster.local import (
        core_count,
        is_here,
        is_host,
        local_cluster,
        this_machine,
    )
    from gpipe_compiler.cluster.timing import timed_link

__all__ = [
    "BUILT_IN",
    "DEFAULT_HOST",
    "GLOO",
    "IN_PROCESS",
    "LINKS",
    "NO_LINK",
    "NVLINK2",
    "NVLINK3",
    "NVLINK4",
    "NVLINK5",
    "PCIE3",
    "PCIE4",
    "PCIE5",
    "Arithmetic",
    "Card",
    "Cluster",
    "Device",
    "Link",
    "built_in",
    "core_count",
    "devices_named",
    "is_here",
    "is_host",
    "local_cluster",
    "read_cluster",
    "this_machine",
    "timed_link",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "timing" if name == "timed_link" else "local"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
