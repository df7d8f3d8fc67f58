"""How this process gets its memory from the system."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1


def keep_memory() -> bool:
    """Let malloc keep freed memory for the next micro-batch, for as long as the process lives.

    By default the C library gives every large block back to the system when it is freed, and takes
    the page faults of a new one for the next op: a sixth of the time of ResNet-50 in the plain
    accumulation of small micro-batches. The peak of memory stays the same; it is not given back in
    between.

    Returns:
        Whether the C library can be told (glibc can).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        tell = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(tell(_MMAP_THRESHOLD, _LARGEST // 2) and tell(_TRIM_THRESHOLD, _LARGEST))
