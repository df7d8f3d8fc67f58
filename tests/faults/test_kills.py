"""Ranks that die in the middle of training, against a run that nobody disturbs."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

import forked
import pytest
import torch
from safetensors.torch import load_file
from torchrun import PATIENCE_S, TWO_HOSTS, training

from gpipe_compiler.runtime.checkpoint import latest

STEPS = 60
WORDS = ["--steps", str(STEPS), "--checkpoint-every", "4"]


@pytest.fixture(scope="module")
def undisturbed(package, tmp_path_factory):
    """The weights after all steps."""
    weights = tmp_path_factory.mktemp("undisturbed") / "weights.safetensors"
    done = forked.run([package / "run.py", "train", *WORDS[:2], "--save", weights], ranks=2)
    assert done.returncode == 0, done.stderr
    return load_file(weights)


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    ("kills", "seed", "words"),
    [
        pytest.param(2, 0, [], marks=pytest.mark.slow),
        (2, 2, ["--async-checkpoint"]),
        pytest.param(20, 1, [], marks=pytest.mark.slow),
        pytest.param(20, 3, ["--async-checkpoint"], marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_lose_and_double_no_step(package, undisturbed, tmp_path, kills, seed, words):
    """SIGKILL at random moments: the same weights, every step in the log once."""
    draw = random.Random(seed)
    with training(package, tmp_path, WORDS + words, restarts=kills) as running:
        moments = sorted(draw.sample(range(1, STEPS - 5), kills))
        for moment in moments:
            running.wait_for(moment)
            time.sleep(draw.uniform(0, 0.02))
            running.kill(draw.randrange(2))
        assert running.finish() == 0, running.said()
        assert running.steps() == list(range(1, STEPS + 1))
        assert_same(load_file(running.weights), undisturbed)


@pytest.mark.slow
def test_killed_ranks_go_on_from_an_address(package, undisturbed, tmp_path):
    """As from a folder; what the killed run has claimed is its restart's."""
    there = f"file://{tmp_path / 'address'}"
    words = [*WORDS, "--checkpoint-dir", there]  # the last one counts
    with training(package, tmp_path, words, restarts=2) as running:
        for step, rank in ((10, 0), (30, 1)):
            running.wait_for(step)
            running.kill(rank)
        assert running.finish() == 0, running.said()
        assert running.steps() == list(range(1, STEPS + 1))
        assert_same(load_file(running.weights), undisturbed)
    assert latest(there).name == f"step_{STEPS:08d}"
    names = [path.name for path in latest(there).parent.iterdir()]
    assert names == [f"step_{step:08d}" for step in (STEPS - 8, STEPS - 4, STEPS)]


@pytest.fixture(scope="module")
def two_hosts():
    """Nothing here can be tested where the kernel lets nobody make namespaces."""
    try:
        made = subprocess.run([str(TWO_HOSTS), "true"], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no unshare on this system")
    if made.returncode:
        pytest.skip(f"no network namespaces: {made.stderr.decode(errors='replace').strip()}")


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_a_host_that_fails_comes_back(package, undisturbed, tmp_path):
    """All processes of one host are killed at once; torchrun on the other one waits for it."""
    with training(package, tmp_path, [*WORDS, "--resume"], restarts=3, hosts=2) as running:
        running.wait_for(10)
        running.fail_host(1)
        assert running.finish() == 0, running.said()
        assert running.steps() == list(range(1, STEPS + 1))
        assert_same(load_file(running.weights), undisturbed)


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.slow
def test_two_hosts_start_again_together(package, undisturbed, tmp_path):
    """A rank is killed on one host and then on the other; both go on from the same checkpoint."""
    with training(package, tmp_path, WORDS, restarts=3, hosts=2) as running:
        for step, rank in ((10, 0), (30, 1)):
            running.wait_for(step)
            running.kill(rank)
        assert running.finish() == 0, running.said()
        assert running.steps() == list(range(1, STEPS + 1))
        assert_same(load_file(running.weights), undisturbed)


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_end_with_a_message(package, tmp_path, rank, how):
    """Without restarts: the other rank says at which value it waited, or to whom it was to send."""
    # It is also how long the ranks have to come: of one that has ended nobody waits for it.
    timeout = "15" if how is signal.SIGSTOP else "120"
    with training(package, tmp_path, ["--steps", "100000", "--timeout", timeout]) as running:
        running.wait_for(5)
        pid = running.ranks()[rank]
        os.kill(pid, how)
        running.wait_for_words("error:")
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
        assert running.finish() == 1
        said = running.said()
    other = 1 - rank
    waited = rf"rank {other}: error: rank {other} (gave up|has lost the way) [^\n]*rank {rank}"
    assert re.search(waited, said), said
    assert "Traceback" not in said


@pytest.mark.slow
def test_ranks_of_a_host_without_failures_know_of_a_restart(package, tmp_path):
    """Over several hosts torchrun counts a restart only where processes have failed."""
    script = '[ "$RANK" = 0 ] || export TORCHELASTIC_RESTART_COUNT=1; exec "$@"'
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--no-python", "sh", "-c", script, "sh"]
    command += [sys.executable, str(package / "run.py"), "train"]
    command += ["--checkpoint-dir", str(tmp_path / "checkpoints")]

    for steps in (3, 6):
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr

    assert "step_00000003, step 3" in done.stdout
