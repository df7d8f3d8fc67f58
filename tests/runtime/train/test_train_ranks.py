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
from sized_pipelines import sized_spec
from tiny_pipelines import WIDTH, norm_spec, skip_spec
from training_commands import BROKEN, EVALUATION, LOG, METRICS, PLAIN, SHUFFLED, Run, plain_loop

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
    hooks = LOG + PLAIN + EVALUATION + METRICS.replace('"samples": len(target)', '"seen": 1')
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
        step, numbers = ranks.logged[number]
        assert step == line["step"]
        for name, own in (
            ("loss", "loss"),
            ("learning_rate", "lr"),
            ("gradient_norm", "grad_norm"),
        ):
            assert numbers[name] == line[own]
    for found, expected in zip(ranks.evaluations, threads.evaluations, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


INDEXED = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        with open(READ + os.environ.get("RANK", ""), "a") as file:
            print(index, file=file)
        generator = torch.Generator().manual_seed(index)
        return torch.randn({WIDTH}, generator=generator)

def collated(rows):
    x = torch.stack(rows)
    return (x,), x.flip(1)

def train_data():
    return torch.utils.data.DataLoader(
        Numbers(), batch_size=8, shuffle=True, collate_fn=collated, num_workers={workers}
    )

def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)
"""


def indexed(folder, workers=0):
    """The hooks of a data set with indices, which notes what is read of it in files of a folder."""
    folder.mkdir()
    text = INDEXED.replace("{WIDTH}", str(WIDTH)).replace("{workers}", str(workers))
    return Run(folder, skip_spec(), f"READ = {str(folder / 'read')!r}\n{text}")


def rows_read(folder, rank=""):
    return [int(line) for line in (folder / f"read{rank}").read_text().split()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_load_their_own_rows_of_the_batches_of_plain_training(tmp_path, workers):
    """Shuffled, the last batch smaller, and resumed in the midst of a pass by a process alone."""
    alone = indexed(tmp_path / "alone")
    ranks = indexed(tmp_path / "ranks", workers)
    assert alone("--epochs", 2) == 0
    code, _, err = trained("skip", ranks, "--epochs", 2, "--data-parallel", 2)
    assert code == 0, err

    torch.testing.assert_close(ranks.weights, alone.weights, rtol=1e-5, atol=1e-6)
    for key in ("samples", "loss"):
        expected = [line[key] for line in alone.steps]
        assert [line[key] for line in ranks.steps] == pytest.approx(expected, rel=1e-5)
    if not workers:
        order = rows_read(tmp_path / "alone")
        first, second = (rows_read(tmp_path / "ranks", rank) for rank in (0, 1))
        assert sorted(first + second) == sorted(order)
        assert (first[:4], second[:4]) == (order[:4], order[4:8])

    begun, resumed = indexed(tmp_path / "begun", workers), indexed(tmp_path / "resumed")
    words = ("--checkpoint-dir", tmp_path / "kept")
    code, _, err = trained("skip", begun, "--steps", 4, "--data-parallel", 2, *words)
    assert code == 0, err
    assert resumed("--epochs", 2, *words, "--resume") == 0
    torch.testing.assert_close(resumed.weights, alone.weights, rtol=1e-5, atol=1e-6)


PADDED = """
from sized_pipelines import WORDS, WIDTH, CLASSES

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return 1 + index

def padded(lengths):
    shape = len(lengths), max(lengths)
    ids = torch.arange(shape[0] * shape[1]).view(shape) % WORDS
    call = (ids, torch.ones(shape)), {"memory": torch.ones(shape[0], 4, WIDTH)}
    return call, ids % CLASSES

def train_data():
    return torch.utils.data.DataLoader(Texts(), batch_size=8, collate_fn=padded)
"""


@pytest.mark.parametrize("words", [(), ("--read", "batches")])
def test_tokens_of_all_replicas_are_told(tmp_path, words):
    """Of each the rows that it pads, or of the whole batch."""
    run = Run(tmp_path, sized_spec(), PADDED + LOG)
    words = ("--epochs", 1, "--data-parallel", 2, "--schedule", "gpipe", *words)
    command = [*words_of("sized", run, *words)]
    done = forked.run(command, ranks=2)
    assert done.returncode == 0, done.stderr

    found = [
        metrics["tokens_per_s"] * line["seconds"]
        for (_, metrics), line in zip(run.logged, run.steps, strict=True)
    ]
    padded = [4 * 4 + 4 * 8, 4 * 12 + 4 * 16] if len(words) == 6 else [8 * 8, 8 * 16]
    assert found == pytest.approx(padded)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (("shuffle=True", "sampler=[RANK] * 8"), (), "as rank 1 has read it, is not that of"),
        pytest.param(
            *(("batch_size=8", "batch_size=1"), (), "a batch of 1 is too small for 2 replicas"),
            marks=pytest.mark.slow,
        ),
        (("stack(rows)", "stack(rows * 2)"), (), "4 rows of the data set became 8 samples"),
        pytest.param(
            *(("stack(rows)", "stack(rows * 2)"), ("--read", "batches"), ""),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rows_that_are_no_share_of_one_batch_are_refused(tmp_path, change, words, message):
    run = indexed(tmp_path / "run")
    file = tmp_path / "run" / "model.py"
    file.write_text(file.read_text().replace(*change).replace("RANK]", "int(os.environ['RANK'])]"))

    code, _, err = trained("skip", run, "--steps", 2, "--data-parallel", 2, *words)

    assert message in err
    assert (code == 0) is not bool(message)


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
        (PLAIN + "def log(step, metrics):\n    1 / 0", "ZeroDivisionError"),
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


SHARES = """
def shares(sizes, rank, world, seed):
    for number, size in enumerate(sizes):
        (x,), target = batch(size, seed + number)
        yield (x.tensor_split(world)[rank],), target.tensor_split(world)[rank]

def train_data(rank, world):
    return shares((8, 6, 7, 3), rank, world, int(torch.randint(100, ())))

def eval_data(rank, world):
    return shares((7, 2), rank, world, 50)

def metrics(output, target):
    return {"mistake": (output["y"] - target).abs().mean()}

def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)
"""


def assert_alike(found, expected):
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)
    for key in ("samples", "loss"):
        numbers = [line[key] for line in expected.steps]
        assert [line[key] for line in found.steps] == pytest.approx(numbers, rel=1e-5)
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_hooks_that_take_rank_and_world_give_each_replica_its_share(tmp_path):
    """Of batches of any size, in training and evaluation; and gone on with by a process alone."""
    runs = {}
    for name in ("alone", "ranks", "begun"):
        (tmp_path / name).mkdir()
        runs[name] = Run(tmp_path / name, skip_spec(), SHARES)
    assert runs["alone"]("--epochs", 2) == 0
    words = ("--data-parallel", 2)
    code, _, err = trained("skip", runs["ranks"], "--epochs", 2, *words)
    assert code == 0, err
    assert_alike(runs["ranks"], runs["alone"])

    kept = ("--checkpoint-dir", tmp_path / "kept")
    code, _, err = trained("skip", runs["begun"], "--steps", 6, *words, *kept)
    assert code == 0, err
    assert runs["begun"]("--epochs", 2, *kept, "--resume") == 0
    torch.testing.assert_close(runs["begun"].weights, runs["alone"].weights, rtol=1e-5, atol=1e-6)


EVALUATED = """
def eval_data():
    return torch.utils.data.DataLoader(Numbers(), batch_size=6, collate_fn=collated)

def metrics(output, target):
    return {"mistake": (output["y"] - target).abs().mean()}
"""


@pytest.mark.parametrize("loader", ["torch.utils.data.DataLoader", "StatefulDataLoader"])
def test_evaluation_loads_its_own_rows_too(tmp_path, loader):
    """Of torch's loader and of torchdata's, which is gone on with in the midst of a pass."""
    text = INDEXED.replace("{WIDTH}", str(WIDTH)).replace("{workers}", "0") + EVALUATED
    if loader == "StatefulDataLoader":
        pytest.importorskip("torchdata")
        text = "from torchdata.stateful_dataloader import StatefulDataLoader\n" + text
    text = text.replace("torch.utils.data.DataLoader", loader)
    runs = {}
    for name in ("alone", "ranks", "begun"):
        (tmp_path / name).mkdir()
        read = f"READ = {str(tmp_path / name / 'read')!r}\n"
        runs[name] = Run(tmp_path / name, skip_spec(), read + text)
    assert runs["alone"]("--epochs", 2) == 0
    code, _, err = trained("skip", runs["ranks"], "--epochs", 2, "--data-parallel", 2)
    assert code == 0, err
    assert_alike(runs["ranks"], runs["alone"])
    order = rows_read(tmp_path / "alone")
    first, second = (rows_read(tmp_path / "ranks", rank) for rank in (0, 1))
    assert sorted(first + second) == sorted(order)
    if loader == "StatefulDataLoader":
        words = ("--checkpoint-dir", tmp_path / "kept")
        assert runs["begun"]("--steps", 4, *words) == 0
        words = (*words, "--epochs", 2, "--resume", "--data-parallel", 2)
        code, _, err = trained("skip", runs["begun"], *words)
        assert code == 0, err
        torch.testing.assert_close(
            runs["begun"].weights, runs["alone"].weights, rtol=1e-5, atol=1e-6
        )
