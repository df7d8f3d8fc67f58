"""The whole training command, on pipelines written by hand.

Held against the plain loop over plain modules (whole mini-batches, where no operator mixes samples)
and, bit by bit, against the command's own undisturbed run.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_pipelines import WIDTH, norm_spec, plain, skip_spec

from gpipe_compiler.runtime.checkpoint import latest
from gpipe_compiler.runtime.command import main
from gpipe_compiler.runtime.pipeline import Pipeline
from gpipe_compiler.runtime.update import Update
from gpipe_compiler.runtime.weights import load_file

SIZES = (8, 8, 5, 3)
"""Of the mini-batches of a pass; the last has fewer samples than there are micro-batches."""

DATA = f"""
import os, random, signal
import torch

SIZES = {SIZES}

def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, {WIDTH}, generator=generator)
    return (x,), x.flip(1)
"""

PLAIN = """
def train_data():
    for number, size in enumerate(SIZES):
        yield batch(size, number)

def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)
"""

SHUFFLED = """
def train_data():
    # An order and numbers that all generators have a say in.
    items = [batch(8, number)[0] for number in range(3)]
    random.shuffle(items)
    for number in torch.randperm(3).tolist():
        (x,) = items[number]
        yield x + 0.1 * torch.randn(()), None

def make_optimizer(params):
    return torch.optim.Adam(params, lr=0.05)

def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""

EVALUATION = """
def eval_data():
    random.random()
    for number, size in enumerate((7, 2, 6)):
        x = batch(size, 50 + number)[0][0]
        yield x + 0 * torch.randn(()), TARGET(x)
"""


class Run:
    """Calls of the command on one package; what the last one has left."""

    def __init__(self, folder, spec, hooks):
        self.folder = folder
        self.spec = spec
        self.hooks = folder / "model.py"
        self.hooks.write_text(DATA + hooks)
        self.log = folder / "train.jsonl"
        self.saved = folder / "out.safetensors"

    def __call__(self, *words):
        self.saved.unlink(missing_ok=True)
        given = [
            "train",
            "--log-file",
            str(self.log),
            "--save",
            str(self.saved),
            "--devices",
            "cpu",
        ]
        return main(self.spec, self.folder, str(self.hooks), [*given, *map(str, words)])

    @property
    def weights(self):
        return load_file(self.saved)

    @property
    def lines(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def steps(self):
        return [line for line in self.lines if "step" in line]

    @property
    def evaluations(self):
        return [line["evaluation"] for line in self.lines if "evaluation" in line]

    def initial(self):
        with Pipeline(self.spec, None, devices="cpu") as pipe:
            return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


@pytest.fixture
def run(tmp_path):
    """Makes runs in a folder of their own."""
    made = []

    def make(spec, hooks):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(folder)
        return Run(folder, spec, hooks)

    return make


def plain_modules(spec, state):
    """The stages, one after another a plain model, with these weights."""
    modules = [stage.module() for stage in spec.stages]
    for module, stage in zip(modules, spec.stages, strict=True):
        own = module.state_dict()
        for name in own:
            own[name].copy_(state[stage.state[name]])
    return modules


def batches(sizes, seed=0):
    for number, size in enumerate(sizes, seed):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(size, WIDTH, generator=generator)
        yield {"x": x, "target": x.flip(1)}


def plain_loop(spec, state, *, passes, accumulate=1, clip=None, schedule=None):
    """What anybody would write: weights, losses, rates and norms of the steps."""
    modules = plain_modules(spec, state)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    scheduler = schedule(optimizer) if schedule else None
    told = []
    for _ in range(passes):
        items = list(batches(SIZES))
        for start in range(0, len(items), accumulate):
            group = items[start : start + accumulate]
            optimizer.zero_grad()
            total = 0.0
            for values in group:
                loss = plain(spec, modules, values)["loss"]
                (loss / len(group)).backward()
                total += loss.item() / len(group)
            bound = math.inf if clip is None else clip
            norm = torch.nn.utils.clip_grad_norm_(parameters, bound).item()
            told.append((total, optimizer.param_groups[0]["lr"], norm))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    weights = {
        stage.state[own]: tensor
        for module, stage in zip(modules, spec.stages, strict=True)
        for own, tensor in module.state_dict().items()
    }
    return weights, told


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_epochs_with_smaller_last_batches_and_accumulation(run, accumulate):
    """Every batch counts; a step takes those of one pass only."""
    spec = skip_spec()
    trained = run(spec, PLAIN)

    assert trained("--epochs", 2, "--accumulate", accumulate) == 0

    weights, told = plain_loop(spec, trained.initial(), passes=2, accumulate=accumulate)
    torch.testing.assert_close(trained.weights, weights, rtol=1e-5, atol=1e-6)
    assert [line["loss"] for line in trained.steps] == pytest.approx([x[0] for x in told], rel=1e-5)
    per_pass = [sum(SIZES[at : at + accumulate]) for at in range(0, len(SIZES), accumulate)]
    assert [line["samples"] for line in trained.steps] == per_pass * 2


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        (
            ("--lr-schedule", "cosine"),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ),
        (
            ("--warmup-steps", "4"),
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min(1.0, (step + 1) / 4)
            ),
        ),
    ],
)
def test_schedules(run, words, schedule):
    """By --steps in the middle of a pass, and to the end of what --steps says."""
    spec = skip_spec()
    trained = run(spec, PLAIN)

    assert trained("--steps", 8, *words) == 0

    weights, told = plain_loop(spec, trained.initial(), passes=2, schedule=schedule)
    torch.testing.assert_close(trained.weights, weights, rtol=1e-5, atol=1e-6)
    assert [line["lr"] for line in trained.steps] == pytest.approx([x[1] for x in told])


def test_the_schedule_ends_with_the_epochs_where_the_data_has_a_length(run):
    """Two passes of four batches, three for a step: four steps."""
    listed = PLAIN.replace("def train_data", "def listed")
    listed += "\ndef train_data():\n    return list(listed())\n"
    trained = run(skip_spec(), listed)

    words = ("--epochs", 2, "--accumulate", 3, "--lr-schedule", "linear")
    assert trained(*words) == 0
    assert [line["lr"] for line in trained.steps] == pytest.approx([0.3, 0.225, 0.15, 0.075])


def test_clipping(run):
    """By the norm over all stages."""
    spec = skip_spec()
    trained = run(spec, PLAIN)

    assert trained("--epochs", 2, "--accumulate", 2, "--clip-norm", 0.2) == 0

    weights, told = plain_loop(spec, trained.initial(), passes=2, accumulate=2, clip=0.2)
    torch.testing.assert_close(trained.weights, weights, rtol=1e-5, atol=1e-6)
    norms = [line["grad_norm"] for line in trained.steps]
    assert norms == pytest.approx([x[2] for x in told], rel=1e-5)
    assert max(norms) > 0.2


METRICS = """
TARGET = lambda x: x.flip(1)

def metrics(output, target):
    assert target.shape == output["y"].shape
    return {"mistake": (output["y"] - target).abs().mean(), "samples": len(target)}
"""


def test_evaluation_is_that_of_all_the_data(run, capsys):
    """Uneven batches count by their samples; metrics are means over samples."""
    spec = skip_spec()
    trained = run(spec, PLAIN + EVALUATION + METRICS)

    assert trained("--steps", 8) == 0

    modules = plain_modules(spec, trained.weights)
    parts = list(batches((7, 2, 6), 50))
    whole = {name: torch.cat([part[name] for part in parts]) for name in ("x", "target")}
    found = plain(spec, modules, whole)
    last = trained.evaluations[-1]
    assert last["step"] == 8
    assert last["loss"] == pytest.approx(found["loss"].item(), rel=1e-5)
    mistake = (found["y"] - whole["target"]).abs().mean().item()
    assert last["mistake"] == pytest.approx(mistake, rel=1e-5)
    assert last["samples"] == pytest.approx((7 * 7 + 2 * 2 + 6 * 6) / 15)
    assert f"evaluation after step 8: loss {last['loss']:.6g}  mistake" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "more", "at"),
    [
        (("--steps", 7), (), [3, 6, 7]),
        (("--epochs", 2), (), [3, 6]),
        (("--steps", 5), ("--evaluate-every", 2), [2, 4, 5]),
    ],
)
def test_evaluation_leaves_no_trace(run, words, more, at):
    """With dropout, BatchNorm and data from all generators: the same bits as without it."""
    without = run(norm_spec(), SHUFFLED)
    trained = run(norm_spec(), SHUFFLED + EVALUATION + "TARGET = lambda x: None\n")

    assert without(*words) == 0
    assert trained(*words, *more) == 0

    assert [found["step"] for found in trained.evaluations] == at
    assert_same(trained, without)


def assert_same(run, other):
    """Weights and log, bit by bit."""
    for name, tensor in other.weights.items():
        assert torch.equal(run.weights[name], tensor), name
    timeless = [[{**line, "seconds": 0} for line in side.steps] for side in (run, other)]
    assert timeless[0] == timeless[1]


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


BROKEN = """
def train_data():
    for number in range(4):
        (x,), target = batch(8, number)
        yield (x,), target * (float("{value}") if number == 2 else 1)
"""


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


def test_clipping_under_fp16_is_by_the_true_norm(run):
    """Not by that of the scaled gradients, 65536 times as large."""
    words = ("--epochs", 1, "--clip-norm", 0.2)
    exact, rounded = run(skip_spec(), PLAIN), run(skip_spec(), PLAIN)
    assert exact(*words) == rounded(*words, "--precision", "fp16") == 0
    norms, others = ([line["grad_norm"] for line in side.steps] for side in (exact, rounded))
    assert others == pytest.approx(norms, rel=0.02)
    torch.testing.assert_close(rounded.weights, exact.weights, rtol=0.01, atol=0.01)


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


def test_export_and_load_of_a_checkpoint(run, capsys):
    """The weights of a checkpoint as one file; a new run begins from them at step 0."""
    kept = run(norm_spec(), SHUFFLED)
    folder = kept.folder / "kept"
    assert kept("--steps", 2, "--checkpoint-dir", folder) == 0
    trained = kept.weights
    file = kept.folder / "file.safetensors"

    words = ["export", "--checkpoint", str(folder), "--output", str(file)]
    assert main(kept.spec, kept.folder, argv=words) == 0
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
