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
    built_in,
)
from gpipe_compiler.cluster.file import read_cluster
from gpipe_compiler.cluster.hosts import devices_named, is_host
from gpipe_compiler.cluster.machines import NO_LINK, Arithmetic, Cluster, Device, Link

if TYPE_CHECKING:
    from gpipe_compiler.cluster.local import (
        core_count,
        is_here,
        local_cluster,
        this_machine,
    )

__all__ = [
    "BUILT_IN",
    "DEFAULT_HOST",
    "GLOO",
    "IN_PROCESS",
    "LINKS",
    "NO_LINK",
    "Arithmetic",
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
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.local"), name)
