"""Objects of the user's in checkpoints: an average of the weights, and a list that grows."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from faults_model import MODEL
from torchrun import training

from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.runtime.checkpoint import latest, read_checkpoint

STEPS = 40

STATES = '''

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Seen:
    """Counts steps."""

    def __init__(self):
        self.steps = []

    def state_dict(self):
        return {"steps": self.steps, "sum": torch.tensor(sum(self.steps))}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        assert sum(self.steps) == state["sum"]


def make_state(pipe, optimizer):
    average = AveragedModel(pipe, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    seen = Seen()

    def after_step(*_):
        average.update_parameters(pipe)
        seen.steps.append(len(seen.steps))

    optimizer.register_step_post_hook(after_step)
    return {"average": average, "seen": seen}
'''


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The same model in two stages, and in one."""
    folder = tmp_path_factory.mktemp("states")
    (folder / "model.py").write_text(MODEL + STATES)
    for stages in (1, 2):
        words = [str(folder / "model.py"), "--stages", str(stages), "-m", "4", "--no-validate"]
        assert compile_command([*words, "-o", str(folder / f"x{stages}")]) == 0
    return folder


def train(package: Path, folder: Path, *words: object) -> None:
    words = ["--steps", STEPS, "--checkpoint-dir", folder, *words]
    done = forked.run([package / "run.py", "train", *words])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_states_survive_kills_and_other_numbers_of_stages(packages, tmp_path):
    """Two processes, one of which is killed; then one alone, from the states of both."""
    train(packages / "x1", tmp_path / "whole")
    words = ["--steps", str(STEPS // 2), "--checkpoint-every", "4"]
    with training(packages / "x2", tmp_path / "run", words, restarts=1) as running:
        running.wait_for(7)
        running.kill(1)
        assert running.finish() == 0, running.said()
    half = read_checkpoint(latest(running.checkpoints))
    assert half.extra["seen"]["steps"] == list(range(STEPS // 2))
    names = {name.removeprefix("module.") for name in half.extra["average"]}
    assert names == {"n_averaged", *half.model}
    train(packages / "x1", running.checkpoints, "--resume")

    found, whole = (
        read_checkpoint(latest(folder)) for folder in (running.checkpoints, tmp_path / "whole")
    )
    assert found.extra["seen"]["steps"] == list(range(STEPS))
    assert int(found.extra["average"]["n_averaged"]) == STEPS
    expected = whole.extra["average"]
    assert found.extra["average"].keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found.extra["average"][name], tensor, rtol=1e-4, atol=1e-5)
    assert not torch.equal(expected["module.0.0.weight"], whole.model["0.0.weight"])
