"""The numbers of every step that the user's `log` and TensorBoard are given."""

from __future__ import annotations

import functools
import json
import logging
import math
import shutil
import sys

import numpy
import pytest
import sized_pipelines
import torch
from sized_pipelines import sized_batch, sized_spec
from tiny_pipelines import skip_spec
from training_commands import EVALUATION, LOG, METRICS, PLAIN, Run, plain_loop

from gpipe_compiler.runtime.sizes import Size
from gpipe_compiler.runtime.train.data import counts_of, has_tokens
from gpipe_compiler.runtime.train.hooks import is_log
from gpipe_compiler.runtime.train.told import Peak, Told

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("word", "clip"), [(("--gradient-norm",), None), (("--clip-norm", 0.2), 0.2)]
)
def test_log_is_given_the_numbers_of_plain_training(tmp_path, word, clip):
    """The norm also where nothing is clipped, which it does not change by a bit."""
    run = Run(tmp_path, skip_spec(), PLAIN + LOG)
    words = ("--gradient-norm",) if clip is None else ("--clip-norm", clip)

    assert run("--epochs", 2, "--accumulate", 2, *words) == 0

    weights, told = plain_loop(skip_spec(), run.initial(), passes=2, accumulate=2, clip=clip)
    torch.testing.assert_close(run.weights, weights, rtol=1e-5, atol=1e-6)
    found = run.logged
    assert [step for step, _ in found] == [1, 2, 3, 4]
    for (_, metrics), line, expected in zip(found, run.steps, told, strict=True):
        numbers = [metrics[name] for name in ("loss", "learning_rate", "gradient_norm")]
        assert numbers == pytest.approx(expected, rel=1e-5)
        assert metrics["samples_per_s"] == line["samples"] / line["seconds"]
        assert set(metrics) == {"loss", "learning_rate", "gradient_norm", "samples_per_s"}
    if clip is None:
        normed = run.weights
        assert run("--epochs", 2, "--accumulate", 2) == 0
        assert all(torch.equal(normed[name], tensor) for name, tensor in run.weights.items())
        assert "gradient_norm" not in run.logged[-1][1]


def test_the_plan_tells_the_bubble_of_steps_that_it_was_made_for(tmp_path):
    """Mini-batches of other sizes, and other micro-batches, have another one."""
    run = Run(tmp_path, skip_spec(), PLAIN + LOG)
    plan = {"prediction": {"step_s": 1.0, "bubble": 0.25}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))

    assert run("--epochs", 1, "--devices", "cpu,cpu,cpu,cpu") == 0
    assert run("--steps", 1, "--devices", "cpu,cpu,cpu,cpu", "--microbatches", 2) == 0

    bubbles = [metrics.get("planned_bubble") for _, metrics in run.logged]
    assert bubbles == [0.25, 0.25, None, None, None]


def test_the_arithmetic_of_a_plan_is_held_against_known_gpus_alone():
    """A step of 2 s in which two devices would need half a second each at their peak."""
    stages = [{"arithmetic_s": 0.2}, {"arithmetic_s": 0.05}]
    cluster = {"devices": [{"name": "A100"}, {"name": "A100"}, {"name": "T4"}]}
    plan = {"stages": stages, "cluster": cluster, "slots": [0, 1], "microbatches": 4}
    peak = Peak.read(plan)
    assert peak == Peak(0.5, "A100")
    told = Told("predicted", 1.0, bubble=0.25, peak=peak)
    same = {"NVIDIA A100-SXM4-80GB"}
    assert told.numbers(4.0, same, minibatches=2) == {"planned_bubble": 0.25, "mfu": 0.25}
    for other in ("NVIDIA A100-PCIE-40GB", "NVIDIA A10", "Tesla T4", "cpu"):
        assert told.numbers(4.0, {*same, other}, minibatches=2) == {"planned_bubble": 0.25}
    assert Peak(1.0, "H100 PCIe").is_of("NVIDIA H100 PCIe")
    assert not Peak(1.0, "H200").is_of("NVIDIA GH200 480GB")
    assert not Peak(1.0, "x86_64 host").is_of("cpu")
    assert Peak.read({**plan, "slots": [1, 2]}) is None
    assert Peak.read({**plan, "stages": [{}, {}]}) is None


def test_tokens_are_counted_where_a_size_is_called_so(monkeypatch):
    """Of a mini-batch, and of micro-batches that differ in length."""
    assert not has_tokens(sized_spec())
    tokens = Size("tokens", of=("ids", 1), example=8)
    monkeypatch.setattr(sized_pipelines, "TOKENS", tokens)
    spec = sized_spec()

    assert has_tokens(spec)
    assert counts_of(spec, 2, *sized_batch(6, 12, 4)) == (6, 6 * 12)
    several = zip(sized_batch(6, 12, 4), sized_batch(3, 33, 4), strict=True)
    assert counts_of(spec, 2, *map(list, several)) == (6 + 3, 6 * 12 + 3 * 33)


def test_what_log_raises_ends_the_run_with_its_line(tmp_path, capsys):
    raising = "def log(step, metrics):\n    if step == 2:\n        int('no number')\n"
    run = Run(tmp_path, skip_spec(), PLAIN + raising)

    assert run("--steps", 3) == 1

    lines = run.hooks.read_text().splitlines()
    line = 1 + lines.index("        int('no number')")
    told = f"error: log() of {run.hooks}, line {line}, failed: ValueError: invalid literal"
    assert told in capsys.readouterr().err
    assert [line["step"] for line in run.steps] == [1, 2]


class Tracker:
    def log(self, step, metrics, *, commit=True):
        pass


@pytest.mark.parametrize(
    ("item", "is_one"),
    [
        (lambda step, metrics: None, True),
        (Tracker().log, True),
        (functools.partial(Tracker.log, Tracker()), True),
        (math.log, False),
        (torch.log, False),
        (numpy.log, False),
        (logging.getLogger("model"), False),
        (lambda message: None, False),
        (None, False),
    ],
)
def test_a_log_of_something_else_is_no_hook(item, is_one):
    assert is_log(item) is is_one


def test_tensorboard_is_refused_where_it_is_not_installed(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run = Run(tmp_path, skip_spec(), PLAIN)

    assert run("--tensorboard", tmp_path / "board") == 2

    err = capsys.readouterr().err
    assert "--tensorboard needs the package tensorboard" in err
    assert "pip install tensorboard" in err
    assert not run.log.exists()


def scalars(folder):
    """By name, the numbers that TensorBoard shows, by step."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {
        name: {event.step: event.value for event in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }


def test_tensorboard_goes_on_where_a_run_is_resumed(tmp_path):
    """With the numbers of `log`; what a killed run wrote of later steps is hidden."""
    pytest.importorskip("tensorboard")
    run = Run(tmp_path, skip_spec(), PLAIN + EVALUATION + METRICS + LOG)
    words = ("--checkpoint-dir", tmp_path / "kept", "--tensorboard", tmp_path / "board")

    assert run("--epochs", 1, "--gradient-norm", *words) == 0
    shutil.copytree(tmp_path / "kept", tmp_path / "first")
    assert run("--steps", 6, *words, "--resume") == 0
    words = ("--checkpoint-dir", tmp_path / "first", *words[2:])
    assert run("--epochs", 2, "--gradient-norm", *words, "--resume") == 0

    found = scalars(tmp_path / "board")
    for name in ("loss", "learning_rate", "gradient_norm", "samples_per_s"):
        expected = {step: metrics[name] for step, metrics in run.logged if name in metrics}
        assert found[name] == pytest.approx(expected, rel=1e-6)
        assert set(found[name]) == set(range(1, 9))
    assert set(found["evaluation/loss"]) == {4, 8}
    assert found["evaluation/mistake"][8] == pytest.approx(run.evaluations[-1]["mistake"])


def test_a_folder_that_cannot_be_written_is_told(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    run = Run(tmp_path, skip_spec(), PLAIN)
    (tmp_path / "board").write_text("a file")

    assert run("--steps", 1, "--tensorboard", tmp_path / "board") == 1

    assert f"error: cannot write {tmp_path / 'board'}: " in capsys.readouterr().err
