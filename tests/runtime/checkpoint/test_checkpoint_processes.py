"""Checkpoints of several processes, and of processes that are killed.

The truths: threads in one process, bit for bit; and numbers that a checkpoint is filled with, so
that two saves mixed up would show.
"""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from checkpoint_runs import Run, equal

from gpipe_compiler.runtime.checkpoint import latest, read_checkpoint

SCRIPT = Path(__file__).parents[1] / "checkpoint_runs.py"


def launch(processes, what, directory):
    done = forked.run([SCRIPT, what, directory], ranks=processes)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_and_threads_read_each_other(processes, tmp_path):
    """With four processes one of them trains nothing."""
    run = Run("tied", "groups", 4, seed=11)
    run.train(2)
    given = run.save(tmp_path / "threads")
    truth = run.state()
    run.close()
    given.rename(tmp_path / "given")

    launch(processes, "ranks", tmp_path)

    for rank in range(processes):
        loaded = torch.load(tmp_path / f"loaded-{rank}.pt")
        assert equal(loaded, {name: truth[name] for name in loaded})
        last = processes - 1
        unwritten = (tmp_path / f"unwritten-{rank}").read_text()
        assert f"rank {last}: cannot write" in unwritten
        assert f"__{last}_0.distcp: No space left on device" in unwritten
        assert "earlier checkpoints" in unwritten
        assert (
            f"rank {last}: {tmp_path / 'nowhere'} is no folder"
            in (tmp_path / f"unread-{rank}").read_text()
        )
    loaded_names = [set(torch.load(tmp_path / f"loaded-{r}.pt")) for r in range(processes)]
    assert set().union(*loaded_names) == set(truth)
    written = tmp_path / "written"
    assert sorted(path.name for path in written.iterdir()) == ["step_00000003", "step_00000006"]
    files = sorted(path.name for path in (written / "step_00000003").glob("*.distcp"))
    assert len(files) == (2 if processes == 2 else 3)

    other = Run("tied", "groups", 2, seed=4)
    other.load(written / "step_00000003")
    other.train(6)
    state = other.state()
    for rank in range(processes):
        found = torch.load(tmp_path / f"truth-{rank}.pt")
        assert equal(found, {name: state[name] for name in found})
    other.load(latest(written))
    assert equal(other.state(), state)
    other.close()
    assert read_checkpoint(latest(written)).kind == "AdamW"


@pytest.mark.slow
def test_replicas_write_one_checkpoint(tmp_path):
    """The first replica writes; the state of either is in it."""
    launch(4, "replicas", tmp_path)

    path = latest(tmp_path / "written")
    assert {path.name for path in path.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    run = Run("tied", "groups", 4, seed=4)
    run.load(path)
    state = run.state()
    run.close()
    for rank in range(4):
        found = torch.load(tmp_path / f"saved-{rank}.pt")
        assert equal(found, {name: state[name] for name in found})


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_write_to_one_address(processes, tmp_path):
    """With four, two replicas of two stages: the first writes."""
    launch(processes, "address", tmp_path)

    there = f"file://{tmp_path / 'written'}"
    path = latest(there)
    assert str(path) == f"{there}/step_00000003"
    assert [each.name for each in path.parent.iterdir()] == ["step_00000003"], "the rest is left"
    files = {each.name for each in path.iterdir() if each.name.endswith(".distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}
    run = Run("tied", "groups", 4, seed=4)
    run.load(path)
    state = run.state()
    run.close()
    for rank in range(processes):
        found = torch.load(tmp_path / f"saved-{rank}.pt")
        assert equal(found, {name: state[name] for name in found})
        unwritten = (tmp_path / f"unwritten-{rank}").read_text()
        assert "rank 1: No space left on device" in unwritten
        assert f"earlier checkpoints in {there}" in unwritten


@pytest.mark.parametrize(
    "what",
    [
        "kill_everywhere",
        "kill_everywhere_at_address",
        "kill_meanwhile",
        pytest.param("kill_meanwhile_at_address", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_touch_of_a_file_loses_nothing(what, tmp_path):
    killed = int(launch(0, what, tmp_path).split()[1])

    assert killed > 20


@pytest.mark.slow
def test_kills_at_random_times_lose_nothing(tmp_path):
    assert int(launch(0, "kill_sometime", tmp_path).split()[1]) > 1
