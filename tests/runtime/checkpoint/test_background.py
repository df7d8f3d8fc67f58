"""Checkpoints that are written while training goes on: those written at once, bit for bit."""

from __future__ import annotations

import threading

import pytest
import torch
from checkpoint_runs import Run, equal

from gpipe_compiler.runtime.checkpoint import (
    BackgroundSaver,
    Progress,
    background,
    latest,
    read_checkpoint,
)
from gpipe_compiler.runtime.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run():
    made = Run("tied", "groups", 4)
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch):
    """Lets nothing be written before it is opened."""
    opened = threading.Event()

    class Waiting(background.Saving):
        def write(self):
            opened.wait(300)
            super().write()

    monkeypatch.setattr(background, "Saving", Waiting)
    return opened


def content(path):
    """All that is in a checkpoint."""
    saved = read_checkpoint(path)
    slots = {
        f"{name}.{slot}": torch.as_tensor(value)
        for name, state in saved.states.items()
        for slot, value in state.items()
    }
    return {**saved.model, **slots}, (saved.groups, saved.scheduler, saved.progress, saved.kind)


def test_training_goes_on_before_anything_is_written(run, tmp_path, gate):
    """Twice, in the same copy in host memory; each appears when it is written, and not before."""
    saver = BackgroundSaver(run.pipe)
    assert saver.poll() is None
    before = None
    for step in (2, 4):
        run.train(step)
        expected = content(run.save(tmp_path / "at_once"))
        gate.clear()
        progress = Progress(step=run.step)
        saver.save(run.optimizer, tmp_path / "later", progress, scheduler=run.schedule)
        run.train(step + 1)
        assert saver.poll() is None
        assert latest(tmp_path / "later") == before
        gate.set()
        while (path := saver.poll()) is None:
            pass
        assert path == latest(tmp_path / "later")
        found = content(path)
        assert equal(found[0], expected[0])
        assert found[1] == expected[1]
        before = path
    assert saver.poll() is None
    assert saver.wait() is None


def test_the_next_one_waits_for_the_one_before(run, tmp_path):
    """And the newest are kept, as when they are written at once."""
    saver = BackgroundSaver(run.pipe)
    for step in range(1, 5):
        run.train(step)
        saver.save(run.optimizer, tmp_path, Progress(step=step), keep=2)
        assert saver.poll() in (None, tmp_path / f"step_{step:08d}")
    saver.wait()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step_00000003", "step_00000004"]


def test_what_fails_meanwhile_is_raised_afterwards(run, tmp_path, monkeypatch):
    """Once; then the next one is written."""
    run.train(1)
    saver = BackgroundSaver(run.pipe)
    with monkeypatch.context() as patch:
        patch.setattr(background.Saving, "_write", _full)
        saver.save(run.optimizer, tmp_path, Progress(step=1))
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait()
    assert list(tmp_path.iterdir()) == []
    saver.save(run.optimizer, tmp_path, Progress(step=1))
    assert saver.wait() == latest(tmp_path)


def _full(*_):
    raise OSError(28, "No space left on device")
