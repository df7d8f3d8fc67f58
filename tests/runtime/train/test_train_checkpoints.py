"""Training that ends and goes on, on pipelines written by hand.

Held, bit by bit, against the command's own undisturbed run.
"""

from __future__ import annotations

import pytest
import torch
from tiny_pipelines import norm_spec
from training_commands import (
    EVALUATION,
    SHUFFLED,
    assert_same,
)

from gpipe_compiler.runtime.checkpoint import latest
from gpipe_compiler.runtime.core.weights import load_file
from gpipe_compiler.runtime.train.command import main
from gpipe_compiler.runtime.train.optimizer import Update

KNOWS_ITS_PLACE = """
class Data:
    def __init__(self):
        self.order, self.at = torch.randperm(3).tolist(), 0

    def __iter__(self):
        while self.at < 3:
            self.at += 1
            yield batch(8, self.order[self.at - 1])[0][0], None

    def state_dict(self):
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = state["order"], state["at"]

def train_data():
    return Data()
"""


@pytest.mark.parametrize("data", [SHUFFLED, KNOWS_ITS_PLACE])
@pytest.mark.parametrize(("stop", "more"), [(2, ()), (3, ()), (4, ()), (3, ("--accumulate", 2))])
def test_resumed_is_undisturbed(run, data, stop, more):
    """Ended within a pass or at its end, and gone on with: the same bits, the same log."""
    whole = run(norm_spec(), data)
    parts = run(norm_spec(), data)
    words = ("--checkpoint-dir", parts.folder / "kept", *more)

    assert whole("--steps", 8, *more) == 0
    assert parts("--steps", stop, *words) == 0
    assert latest(parts.folder / "kept").name == f"step_{stop:08d}"
    assert parts("--steps", 8, *words, "--resume") == 0

    assert_same(parts, whole)
    assert [line["step"] for line in parts.steps] == list(range(1, 9))


@pytest.mark.parametrize("first", [("--steps", 7), ("--steps", 6), ("--epochs", 2)])
def test_a_plateau_is_resumed_undisturbed(run, first):
    """The rate follows evaluations after passes, but not that at the end of a part of a run."""
    hooks = SHUFFLED.replace("lr_scheduler.StepLR(optimizer, 3, 0.5)", "PLATEAU")
    plateau = "lr_scheduler.ReduceLROnPlateau(optimizer, mode='max', factor=0.5, patience=0)"
    hooks = hooks.replace("PLATEAU", plateau) + EVALUATION + "TARGET = lambda x: None\n"
    whole, parts = run(norm_spec(), hooks), run(norm_spec(), hooks)
    words = ("--checkpoint-dir", parts.folder / "kept")

    assert whole("--steps", 11) == 0
    assert parts(*first, *words) == 0
    assert parts("--steps", 11, *words, "--resume") == 0

    assert_same(parts, whole)
    assert len({line["lr"] for line in whole.steps}) > 2


def test_checkpoints_every_so_many_steps(run):
    """And the last; those beyond --keep-checkpoints go. An earlier one can be gone back to."""
    kept = run(norm_spec(), SHUFFLED)
    folder = kept.folder / "kept"
    words = ("--checkpoint-dir", folder, "--checkpoint-every", 2, "--keep-checkpoints", 2)

    assert kept("--steps", 7, *words) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000006", "step_00000007"]
    undisturbed = kept.weights

    assert kept("--steps", 7, *words, "--resume", folder / "step_00000006") == 0
    for name, tensor in undisturbed.items():
        assert torch.equal(kept.weights[name], tensor), name


def test_going_back_to_an_earlier_checkpoint(run, monkeypatch):
    """A restart by torchrun, before the next checkpoint, stays on the new branch."""
    kept = run(norm_spec(), SHUFFLED)
    folder = kept.folder / "kept"
    words = ("--checkpoint-dir", folder, "--checkpoint-every", 2, "--keep-checkpoints", 9)
    assert kept("--steps", 6, *words) == 0

    with monkeypatch.context() as patch:
        patch.setattr(Update, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kept("--steps", 3, *words, "--resume", folder / "step_00000002")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert kept("--steps", 3, *words) == 0

    assert [line["step"] for line in kept.steps] == [1, 2, 3]
    assert latest(folder).name == "step_00000003"


def test_checkpoints_at_the_end_of_every_pass(run):
    kept = run(norm_spec(), SHUFFLED)
    assert kept("--epochs", 2, "--checkpoint-dir", kept.folder / "kept") == 0
    names = sorted(path.name for path in (kept.folder / "kept").iterdir())
    assert names == ["step_00000003", "step_00000006"]


def test_a_directory_with_checkpoints_is_not_written_over(run, capsys):
    """Both ways out are named; a restart by torchrun takes the one that it must."""
    kept = run(norm_spec(), SHUFFLED)
    words = ("--steps", 2, "--checkpoint-dir", kept.folder / "kept")
    assert kept(*words) == 0
    first = kept.weights

    assert kept(*words) == 2
    told = capsys.readouterr().err
    assert "holds checkpoints already, the newest is step_00000002" in told
    assert "go on from there with --resume, or name another --checkpoint-dir" in told

    assert kept(*words, "--resume") == 0
    assert "resumed from" in capsys.readouterr().out
    for name, tensor in first.items():
        assert torch.equal(kept.weights[name], tensor), name


def test_a_restart_by_torchrun_goes_on_by_itself(run, monkeypatch):
    """From the newest checkpoint, or from the beginning where there is none yet."""
    whole, parts = run(norm_spec(), SHUFFLED), run(norm_spec(), SHUFFLED)
    assert whole("--steps", 5) == 0
    words = ("--checkpoint-dir", parts.folder / "kept", "--checkpoint-every", 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    assert parts("--steps", 3, *words) == 0
    assert parts("--steps", 5, *words) == 0

    assert_same(parts, whole)


def test_a_job_that_was_refused_is_refused_again(run, monkeypatch, capsys):
    """torchrun starts it again, with the mark of a restart; another job is not affected."""
    kept = run(norm_spec(), SHUFFLED)
    words = ("--steps", 2, "--checkpoint-dir", kept.folder / "kept")
    assert kept(*words) == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert kept(*words) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert kept(*words) == 2
    assert capsys.readouterr().err.count("holds checkpoints already") == 2

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert kept(*words) == 0

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert kept(*words, "--resume") == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert kept(*words) == 0


def test_resuming_where_there_is_nothing_yet_begins(run, capsys):
    begun = run(norm_spec(), SHUFFLED)
    assert begun("--steps", 1, "--checkpoint-dir", begun.folder / "kept", "--resume") == 0
    assert "starting from the beginning" in capsys.readouterr().err
    assert begun("--steps", 1, "--resume", begun.folder / "nowhere") == 1
    assert "there is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_after_the_step(run, capsys, number, code):
    """With a checkpoint; going on from it comes to what the undisturbed run comes to."""
    told_to_stop = SHUFFLED.replace(
        "yield",
        f"if os.environ.pop('STOP_AT_{number}', '') == 'yes': os.kill(os.getpid(), signal.{number})"
        "\n        yield",
    )
    whole, stopped = run(norm_spec(), SHUFFLED), run(norm_spec(), told_to_stop)
    words = ("--steps", 5, "--checkpoint-dir", stopped.folder / "kept")
    assert whole("--steps", 5) == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"STOP_AT_{number}", "yes")
        assert stopped(*words) == code
    assert "stopped after step 1; the checkpoint is" in capsys.readouterr().out
    assert not stopped.saved.exists()
    assert stopped(*words, "--resume") == 0

    assert_same(stopped, whole)


def test_export_and_load_of_a_checkpoint(run, capsys):
    """The weights of a checkpoint as one file; a new run begins from them at step 0."""
    kept = run(norm_spec(), SHUFFLED)
    folder = kept.folder / "kept"
    assert kept("--steps", 2, "--checkpoint-dir", folder) == 0
    trained = kept.weights
    file = kept.folder / "file.safetensors"

    words = ["export", "--checkpoint", str(folder), "--output", str(file)]
    assert main(kept.spec, kept.folder, None, argv=words) == 0
    assert "step_00000002 written to" in capsys.readouterr().out
    exported = load_file(file)
    assert exported.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(exported[name], tensor), name

    assert kept("--steps", 3, "--load", folder) == 0
    from_checkpoint = kept.weights
    assert kept("--steps", 3, "--load", file) == 0
    assert [line["step"] for line in kept.steps] == [1, 2, 3]
    for name, tensor in from_checkpoint.items():
        assert torch.equal(kept.weights[name], tensor), name
