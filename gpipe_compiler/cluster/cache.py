"""What was measured of this machine, kept in a folder so that it is measured once.

The folder is `gpipe_compiler` in `$XDG_CACHE_HOME`, or in `~/.cache`. A file is for one processor,
one version of torch and one number of threads; `gpipe-inspect machine` measures anew. Where nothing
can be written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpipe_compiler.runtime.core.storing import place_text

_FORMAT = 3


def folder() -> Path:
    """Where measurements are kept."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "gpipe_compiler"


def kept(
    kind: str, measure: Callable[[], Mapping[str, Any]], *, anew: bool = False
) -> Mapping[str, Any]:
    """What was measured before; else what is measured now, which is kept unless it is nothing.

    Args:
        kind: of measurement, the beginning of the file's name.
        anew: measure in any case.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no home
        file = folder() / f"{kind}-{_machine()}.json"
        if not anew:
            with contextlib.suppress(OSError, ValueError):
                found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return found
        made = measure()
        if made:
            with contextlib.suppress(OSError):
                place_text(file, json.dumps(made, indent=1) + "\n")
        return made
    return measure()


def _machine() -> str:
    """A word for this processor, this torch, and the threads that it is set to use."""
    named: list[str] = []
    with contextlib.suppress(OSError):  # of Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line for line in lines if line.startswith(("model name", "flags"))]
    facts = (
        _FORMAT,
        *named[:2],
        platform.machine(),
        platform.processor(),
        platform.python_version(),
    )
    settings = torch.__version__, torch.get_num_threads(), os.cpu_count()
    return hashlib.sha256(repr((facts, settings)).encode()).hexdigest()[:12]
