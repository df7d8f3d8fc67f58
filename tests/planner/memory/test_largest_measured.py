"""The largest network that is said to fit a device, and the next one, against what their packages
were seen to hold in training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from fitting_measured import FAMILIES, rows_of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [("transformer", 2), ("amoebanet", 1)])
def test_the_largest_fits_and_the_next_does_not(name: str, stages: int, tmp_path: Path) -> None:
    rows = rows_of(FAMILIES[name], stages, tmp_path)
    assert [row.fits for row in rows] == [True, False]
    assert all(row.right for row in rows)
