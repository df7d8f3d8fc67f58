"""Checkpoints of replicas that divide weights and optimizer among them, and of others.

The truths: a checkpoint of one process, and runs that nobody interrupted.
"""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from checkpoint_runs import Run, equal

from gpipe_compiler.runtime.checkpoint import latest, read_checkpoint

SCRIPT = Path(__file__).parents[1] / "shard_ranks.py"


def launch(processes, what, directory):
    done = forked.run([SCRIPT, what, directory], ranks=processes)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_others_go_on_from_divided_replicas(processes, tmp_path):
    """Every rank writes its rows; one process, and the same ranks, read all of them."""
    launch(processes, "write", tmp_path)

    for kind in ("groups", "momentum"):
        path = latest(tmp_path / kind)
        written = {file.name for file in path.glob("*.distcp")}
        assert written == {f"__{rank}_0.distcp" for rank in range(processes)}
        run = Run("tied", kind, 2, seed=4)
        run.load(path)
        state = run.state()
        for rank in range(processes):
            found = torch.load(tmp_path / f"saved-{kind}-{rank}.pt")
            assert equal(found, {name: state[name] for name in found})
            truth = torch.load(tmp_path / f"truth-{kind}-{rank}.pt")
            assert equal(torch.load(tmp_path / f"again-{kind}-{rank}.pt"), truth)
        run.train(6)
        state = run.state()
        for name, tensor in torch.load(tmp_path / f"truth-{kind}-0.pt").items():
            torch.testing.assert_close(tensor, state[name])
        run.close()
        model = read_checkpoint(path).model
        assert model["head.weight"].shape == model["emb.weight"].shape == (10, 6)


def test_divided_replicas_write_while_training_goes_on(tmp_path):
    """What they write at once, bit for bit."""
    launch(4, "meanwhile", tmp_path)

    one, other = (read_checkpoint(latest(tmp_path / name)) for name in ("at_once", "later"))
    assert equal(one.model, other.model)
    assert one.states.keys() == other.states.keys()
    for name, slots in one.states.items():
        assert slots.keys() == other.states[name].keys()
        assert all(torch.equal(other.states[name][slot], x) for slot, x in slots.items())
    assert (one.groups, one.scheduler, one.progress) == (
        other.groups,
        other.scheduler,
        other.progress,
    )


@pytest.mark.usefixtures("one_thread")
def test_divided_replicas_go_on_from_others(tmp_path):
    run = Run("tied", "groups", 4, seed=11)
    run.train(3)
    run.save(tmp_path / "threads").rename(tmp_path / "given")
    truth = run.state()

    launch(4, "read", tmp_path)

    run.train(6)
    trained = run.state()
    run.close()
    for rank in range(4):
        loaded = torch.load(tmp_path / f"loaded-{rank}.pt")
        assert equal(loaded, {name: truth[name] for name in loaded})
        for name, tensor in torch.load(tmp_path / f"trained-{rank}.pt").items():
            torch.testing.assert_close(tensor, trained[name])
