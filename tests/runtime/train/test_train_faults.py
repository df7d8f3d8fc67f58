"""What training cannot go on with, on pipelines written by hand: the message, and what is left.

The data says what is at fault, so the truth is known; weights and checkpoints stay as they were.
"""

from __future__ import annotations

import pytest
from tiny_pipelines import skip_spec
from training_commands import (
    BROKEN,
    EVALUATION,
    METRICS,
    PLAIN,
)

from gpipe_compiler.runtime.checkpoint import latest


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("more", [(), ("--accumulate", 3), ("--clip-norm", 1)])
def test_a_loss_that_is_not_finite(run, capsys, value, more):
    """It stops before the weights change, and the last checkpoint is whole."""
    broken = run(skip_spec(), BROKEN.format(value=value))
    folder = broken.folder / "kept"
    words = ("--steps", 9, "--checkpoint-dir", folder, "--checkpoint-every", 1, *more)
    done = 0 if "--accumulate" in more else 2

    assert broken(*words) == 1

    told = capsys.readouterr().err
    assert f"error: the loss of step {done + 1}, batch 3 of pass 1 of train_data() of" in told
    assert f"is {value}; the weights are not changed by it" in told
    assert "Traceback" not in told
    assert len(broken.steps) == done
    assert not broken.saved.exists()
    if done:
        assert f"the last checkpoint is {folder / 'step_00000002'}" in told
        assert latest(folder).name == "step_00000002"
    else:
        assert latest(folder) is None


def test_steps_that_overflow_fp16_are_skipped(run, capsys):
    """The weights and the learning rate stay; an error when nothing but that happens."""
    schedule = "def make_scheduler(o):\n    return torch.optim.lr_scheduler.ExponentialLR(o, 0.5)\n"
    trained = run(skip_spec(), BROKEN.format(value="inf") + schedule)

    assert trained("--steps", 5, "--lr", 0.4, "--optimizer", "sgd", "--precision", "fp16") == 0
    assert [line["skipped"] for line in trained.steps] == [False, False, True, False, False]
    assert [line["lr"] for line in trained.steps] == [0.4, 0.2, 0.1, 0.1, 0.05]
    assert [line["loss"] is None for line in trained.steps] == [False, False, True, False, False]
    assert all(tensor.isfinite().all() for tensor in trained.weights.values())
    assert "skipped: fp16 gradients overflow" in capsys.readouterr().out

    words = ("--steps", 100, "--clip-norm", 1, "--precision", "fp16")
    hopeless = run(skip_spec(), BROKEN.format(value="inf").replace("number == 2", "True"))
    assert hopeless(*words) == 1
    assert (
        "the gradients overflow fp16 at every one of the last 50 steps" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        ("yield batch(8, 0)\n    raise OSError('gone')", 1, "failed at batch 2 of pass 1: OSError"),
        ("yield batch(8, 0)\n    yield 1", 2, "batch 2 of pass 1 of train_data() of"),
        ("yield torch.ones(8, 6), torch.ones(7, 6)", 2, "x has 8 samples, target has 7"),
        ("yield torch.ones(0, 6), torch.ones(0, 6)", 2, "batch 1 of pass 1 of train_data() of"),
        ("yield torch.ones(8, 6), None", 2, "target is missing; a tensor is needed"),
    ],
)
def test_batches_that_cannot_be_trained_on(run, capsys, data, code, message):
    """The message says which, in the data."""
    broken = run(skip_spec(), f"def train_data():\n    {data}\n")
    assert broken("--steps", 5) == code
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert "of pass 1" in told


def test_faults_of_evaluation(run, capsys):
    broken = run(skip_spec(), PLAIN + EVALUATION + METRICS.replace("assert", "raise KeyError #"))
    assert broken("--steps", 5) == 1
    assert "metrics() of" in capsys.readouterr().err
    broken = run(skip_spec(), PLAIN + "def eval_data(): return []")
    assert broken("--steps", 5) == 1
    assert "eval_data() of" in capsys.readouterr().err


def test_what_makes_no_sense_together_is_one_message(run, capsys):
    """All of it at once, before anything begins."""
    hooks = PLAIN + "def make_scheduler(optimizer): return 1\n"
    nonsense = run(skip_spec(), hooks)
    words = ("--lr", 1, "--warmup-steps", 3, "--batch-size", 8, "--evaluate-every", 2)

    assert nonsense(*words, "--checkpoint-every", 2, "--resume") == 2

    told = capsys.readouterr().err
    assert told.count("error: ") == 1
    for word in ("--lr:", "--warmup-steps:", "--batch-size", "--evaluate-every", "--checkpoint-"):
        assert word in told
    assert "--resume needs a --checkpoint-dir" in told
    assert "stages" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--input", "x", "--epochs", 2), "--epochs counts passes over train_data()"),
        (("--steps", 4, "--lr-schedule", "linear", "--warmup-steps", 4), "leaves nothing of 4"),
        (("--epochs", 4, "--lr-schedule", "cosine"), "give --steps too"),
        (("--load", "a", "--resume", "b"), "both say where the weights come from"),
    ],
)
def test_contradictions(run, capsys, words, message):
    assert run(skip_spec(), PLAIN)(*words) == 2
    assert message in capsys.readouterr().err
