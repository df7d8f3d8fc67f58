"""The whole training command, on pipelines written by hand.

Held against the plain loop over plain modules (whole mini-batches, where no operator mixes samples)
and, bit by bit, against the command's own run without what must leave no trace.
"""

from __future__ import annotations

import pytest
import torch
from tiny_pipelines import norm_spec, plain, skip_spec
from training_commands import (
    EVALUATION,
    METRICS,
    PLAIN,
    SHUFFLED,
    SIZES,
    assert_same,
    batches,
    plain_loop,
    plain_modules,
)


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


def test_clipping_under_fp16_is_by_the_true_norm(run):
    """Not by that of the scaled gradients, 65536 times as large."""
    words = ("--epochs", 1, "--clip-norm", 0.2)
    exact, rounded = run(skip_spec(), PLAIN), run(skip_spec(), PLAIN)
    assert exact(*words) == rounded(*words, "--precision", "fp16") == 0
    norms, others = ([line["grad_norm"] for line in side.steps] for side in (exact, rounded))
    assert others == pytest.approx(norms, rel=0.02)
    torch.testing.assert_close(rounded.weights, exact.weights, rtol=0.01, atol=0.01)
