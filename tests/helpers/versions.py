"""Which versions of packages are installed."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def pinned(package: str) -> bool:
    """Whether a package has the version of constraints.txt, with which golden texts were made."""
    wanted = re.search(rf"^{package}==(\S+)", CONSTRAINTS.read_text(), re.M)
    assert wanted is not None
    return importlib.metadata.version(package).partition("+")[0] == wanted[1].partition("+")[0]
