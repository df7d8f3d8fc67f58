"""Makes the hand-written pipelines importable, here and in the processes that tests start."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run(tmp_path):
    """Makes runs of the training command, each in a folder of its own."""
    from training_commands import Run

    made = []

    def make(spec, hooks):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(folder)
        return Run(folder, spec, hooks)

    return make
