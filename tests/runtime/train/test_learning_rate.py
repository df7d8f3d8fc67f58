"""The course of the learning rate, against torch's own schedulers and numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from gpipe_compiler.runtime.errors import PipelineError, UsageError
from gpipe_compiler.runtime.train.hooks import UserHooks
from gpipe_compiler.runtime.train.optimizer import OptimizerChoice, Rate, RateShape, make_scheduler

STEPS = 10


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)


def course(rate, steps):
    """The learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(rate.now)
        rate.optimizer.step()
        rate.stepped()
    return found


def chosen(shape, warmup, steps, hooks=None):
    made = optimizer()
    scheduler = make_scheduler(
        made, hooks or UserHooks(), OptimizerChoice(shape=shape, warmup=warmup), steps
    )
    return Rate(made, scheduler)


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        (RateShape.COSINE, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
        (RateShape.LINEAR, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS)),
        (RateShape.CONSTANT, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_without_warm_up_as_torchs_own(shape, own):
    made = optimizer()
    expected = course(Rate(made, own(made)), STEPS)

    assert course(chosen(shape, 0, STEPS), STEPS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "after"),
    [
        (RateShape.CONSTANT, [1, 1, 1, 1]),
        (RateShape.LINEAR, [1, 0.75, 0.5, 0.25]),
        (RateShape.COSINE, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_warm_up_in_equal_parts(shape, after):
    """Four steps up, four steps on; the fourth and the fifth are at the full rate."""
    rate = chosen(shape, 4, 8)

    assert course(rate, 8) == pytest.approx([0.5 * x for x in (0.25, 0.5, 0.75, 1, *after)])
    assert rate.now == pytest.approx(0.5 if shape is RateShape.CONSTANT else 0, abs=1e-12)


def test_steps_beyond_the_end_stay_at_nothing():
    rates = course(chosen(RateShape.COSINE, 0, 3), 6)
    assert rates[3:] == pytest.approx([0, 0, 0], abs=1e-12)


def test_no_choice_is_no_scheduler():
    assert chosen(None, 0, None).scheduler is None


def test_warm_up_alone_needs_no_end():
    assert course(chosen(None, 2, None), 3) == pytest.approx([0.25, 0.5, 0.5])


def test_the_users_scheduler_unless_a_schedule_is_named():
    hooks = UserHooks(
        "model.py", make_scheduler=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5)
    )

    assert course(chosen(None, 0, None, hooks), 3) == [0.5, 0.25, 0.125]
    assert course(chosen(RateShape.CONSTANT, 0, None, hooks), 2) == [0.5, 0.5]


def test_a_plateau_follows_evaluations_and_not_steps():
    made = optimizer()
    rate = Rate(made, lr_scheduler.ReduceLROnPlateau(made, factor=0.1, patience=1))

    assert course(rate, 5) == [0.5] * 5
    for loss in (1.0, 1.0, 1.0):
        rate.evaluated(loss)
    assert rate.now == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("choice", "steps", "message"),
    [
        (
            OptimizerChoice(shape=RateShape.COSINE),
            None,
            "--lr-schedule cosine must know the number of steps",
        ),
        (
            OptimizerChoice(shape=RateShape.LINEAR, warmup=5),
            5,
            "the warm-up of 5 steps leaves nothing of 5 steps",
        ),
    ],
)
def test_what_cannot_be(choice, steps, message):
    with pytest.raises(UsageError, match=message):
        make_scheduler(optimizer(), UserHooks(), choice, steps)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: 3, r"make_scheduler\(\) of model.py gives a int, not a LRScheduler"),
        (lambda _: 1 / 0, r"make_scheduler\(\) of model.py failed: ZeroDivisionError"),
    ],
)
def test_faults_of_the_users_scheduler(make, message):
    with pytest.raises(PipelineError, match=message):
        make_scheduler(
            optimizer(), UserHooks("model.py", make_scheduler=make), OptimizerChoice(), None
        )
