"""The training command over processes, with gloo, compared with the same command in one process.

Real torchrun starts the processes where nothing is amiss, and where it is signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from tiny_pipelines import norm_spec, skip_spec
from training_commands import BROKEN, EVALUATION, METRICS, PLAIN, SHUFFLED, Run, plain_loop

from gpipe_compiler.runtime.checkpoint import latest

# Sums in other orders would end elsewhere: BatchNorm takes the gradient of a bias to nothing but
# rounding, and Adam makes full steps of that.
pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parents[1] / "train_rank.py"
PATIENCE_S = 500


def words_of(name, run, *words):
    command = [SCRIPT, name, run.folder, "train", "--log-file", run.log, "--save", run.saved]
    return [str(word) for word in (*command, "--timeout", 400, *words)]


def started(name, run, *words):
    """By torchrun, on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, *words_of(name, run, *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
    )


def finished(process):
    """The exit code, and what was printed."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def test_processes_train_as_threads_do(tmp_path):
    """Passes of data that rank 0 alone sees, evaluation, a checkpoint that one process resumes."""
    hooks = SHUFFLED + EVALUATION + "TARGET = lambda x: None\n"
    for name in ("ranks", "threads"):
        (tmp_path / name).mkdir()
    ranks = Run(tmp_path / "ranks", norm_spec(), hooks)
    threads = Run(tmp_path / "threads", norm_spec(), hooks)
    words = ("--accumulate", 2, "--checkpoint-dir", tmp_path / "kept")

    code, out, err = finished(started("norm", ranks, "--epochs", 2, *words))
    assert code == 0, err
    assert out.count("evaluation after step") == 2
    assert threads("--epochs", 2, "--accumulate", 2) == 0

    for name, tensor in threads.weights.items():
        assert torch.equal(ranks.weights[name], tensor), name
    for key in ("step", "lr", "samples"):
        assert [line[key] for line in ranks.steps] == [line[key] for line in threads.steps]
    for found, expected in zip(ranks.evaluations, threads.evaluations, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)

    assert threads("--epochs", 3, "--accumulate", 2) == 0
    whole = threads.weights
    assert threads("--epochs", 3, *words, "--resume") == 0
    for name, tensor in whole.items():
        assert torch.equal(threads.weights[name], tensor), name


def trained(name, run, *words):
    """The exit code of two ranks, and what they print."""
    done = forked.run(words_of(name, run, *words), ranks=2)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "asked"), [("skip", ("--data-parallel", 2)), ("twice", ())], ids=["asked", "planned"]
)
def test_replicas_share_every_batch(tmp_path, name, asked):
    """Also the smaller ones, accumulated and clipped, and those of evaluation."""
    for folder in ("ranks", "threads"):
        (tmp_path / folder).mkdir()
    hooks = PLAIN + EVALUATION + METRICS.replace('"samples": len(target)', '"seen": 1')
    ranks = Run(tmp_path / "ranks", skip_spec(), hooks)
    threads = Run(tmp_path / "threads", skip_spec(), hooks)
    words = ("--epochs", 2, "--accumulate", 2, "--clip-norm", 0.2)

    code, out, err = trained(name, ranks, *words, *asked)
    assert code == 0, err
    assert "2 replicas of 1 process" in out
    assert threads(*words) == 0

    weights, told = plain_loop(skip_spec(), ranks.initial(), passes=2, accumulate=2, clip=0.2)
    torch.testing.assert_close(ranks.weights, weights, rtol=1e-5, atol=1e-6)
    for number, (line, other) in enumerate(zip(ranks.steps, threads.steps, strict=True)):
        assert line["loss"] == pytest.approx(told[number][0], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(told[number][2], rel=1e-5)
        assert line["samples"] == other["samples"]
    for found, expected in zip(ranks.evaluations, threads.evaluations, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


OWN_ORDER = """
def train_data():
    for number, size in enumerate(SIZES):
        rank = int(os.environ["RANK"])
        yield batch(size, number if number < 2 else 10 * rank + number)
"""


def test_replicas_that_read_other_data_are_noticed(tmp_path):
    """At the first step that differs, before it changes a weight; rank 0 tells it."""
    run = Run(tmp_path, skip_spec(), OWN_ORDER)

    code, _, err = trained("skip", run, "--epochs", 1, "--data-parallel", 2)

    assert code != 0
    place = "step 3, batch 3 of pass 1 of train_data()"
    assert err.count("error: ") == 1
    assert place in err
    assert "as rank 1 has read it, is not that of rank 0; the weights are not changed" in err
    assert "use the same seed on every rank" in err
    assert len(run.steps) == 2


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            BROKEN.format(value="nan"),
            "error: the loss of step 3, batch 3 of pass 1 of train_data()",
        ),
        pytest.param(
            "def train_data():\n    yield batch(8, 0)\n    1 / 0",
            "ZeroDivisionError",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_ends_one_ends_all(tmp_path, hooks, message):
    """Rank 0 tells why, the other ends without waiting for its timeout."""
    run = Run(tmp_path, skip_spec(), hooks)

    code, _, err = trained("skip", run, "--steps", 9, "--timeout", 2 * PATIENCE_S)

    assert code != 0
    assert err.count(": error: ") == err.count(message) == 1, err
    assert f'{SCRIPT.name}", line' not in err


@pytest.mark.slow
def test_a_signal_to_torchrun(tmp_path):
    """Every rank ends after the same step, with a checkpoint."""
    run = Run(tmp_path, norm_spec(), SHUFFLED)
    process = started("norm", run, "--steps", 10**6, "--checkpoint-dir", tmp_path / "kept")
    while not run.log.exists() or len(run.log.read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)

    code, out, _ = finished(process)

    assert code != 0
    last = latest(tmp_path / "kept")
    assert f"the checkpoint is {last}" in out
    assert int(last.name.removeprefix("step_")) == run.steps[-1]["step"]
