"""Makes the helpers of these tests importable, and one package for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from faults_model import MODEL

from gpipe_compiler.cli.main import compile_command


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """Two stages of a model with dropout, BatchNorm, momentum, a schedule and shuffled data."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.py").write_text(MODEL)
    words = [str(folder / "model.py"), "--stages", "2", "-m", "4", "-o", str(folder / "package")]
    assert compile_command([*words, "--no-validate"]) == 0
    return folder / "package"
