"""The scripts in `benchmarks/` and what draws problems are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS.parent / "benchmarks"), str(_TESTS / "passes")]
