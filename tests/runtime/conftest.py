"""Makes the hand-written pipelines importable, here and in the processes that tests start."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread():
    """Sums in the same order here as in the processes of a pipeline, which have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
