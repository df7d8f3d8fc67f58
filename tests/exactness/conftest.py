"""Makes the packages once, and trains each of them once."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from table import train_layout, write_packages
from training_cases import CASES, train_plain


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the packages stand."""
    return tmp_path_factory.mktemp("exactness")


@pytest.fixture(scope="session")
def packages(folder):
    """The plans of the packages of so many stages, by case; each is written once."""
    return functools.cache(lambda stages: write_packages(folder, stages))


@pytest.fixture(scope="session")
def plain():
    """What the plain loop comes to, by case."""
    return {case.name: train_plain(case) for case in CASES}


@pytest.fixture(scope="session")
def runs(folder, packages):
    """What the packages come to, for a layout and a transport; each is trained once."""

    def trained(layout, transport):
        packages(layout.stages)
        return train_layout(folder, layout, transport)

    return functools.cache(trained)
