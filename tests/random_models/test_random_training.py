"""Random models trained in random ways, compared with the plain loop.

Every example draws a model, a cut, and all that a caller may choose: the schedule, micro-batches,
batch sizes that they divide or not, recomputation stage by stage, how BatchNorm normalises, the
precision, accumulation, clipping, frozen parameters, losses that leave samples out, devices, modes.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, assume, currently_in_test_context, given, note, settings
from random_holding import Held, crossings_checked, hold_training
from random_models import RUN, TYPED, Recipe, recipes
from random_packages import Layout, package_of, plan_of, subject_of, traced
from random_training import (
    PlainLoop,
    Training,
    freeze,
    pipeline,
    training_layouts,
    trainings,
)

from gpipe_compiler.errors import ModelError
from gpipe_compiler.runtime.spec import Precision
from tests.helpers.processors import lstm_in_16_bits


def hold(recipe: Recipe, layout: Layout, training: Training) -> None:
    """Compiles a recipe, and trains its package beside the model."""
    subject = subject_of(recipe, layout)
    freeze(subject.model, training.frozen)
    model = copy.deepcopy(subject.model)
    plan = plan_of(traced(subject), layout)
    with (
        package_of(plan) as (package, directory),
        pipeline(package.SPEC, directory / "weights", training) as pipe,
        crossings_checked(pipe.spec, pipe.options.precision),
    ):
        if currently_in_test_context():
            note(pipe.describe())
        held = Held(PlainLoop(recipe, model, plan, pipe), pipe, layout)
        hold_training(recipe, training, held)


def accept(recipe: Recipe, layout: Layout, training: Training) -> None:
    """Holds a drawn example; a model that does not run by itself is no example."""
    if Precision.BF16 in (layout.precision, training.precision):
        kinds = {step.kind for step in recipe.steps}
        assume(TYPED.isdisjoint(kinds))
        assume(lstm_in_16_bits() or "recurrent" not in kinds)
    try:
        hold(recipe, layout, training)
    except ModelError as error:
        assume("the model raises" not in error.problem)
        raise


EVERY_KIND = sorted(RUN)
OFTEN = ["batch_norm", "running", "dropout", "tied", "frozen"] * 8
"""What training goes wrong with."""
KINDS = [*OFTEN, *EVERY_KIND]
FEW = settings(max_examples=8, derandomize=True, deadline=None, database=None)
MANY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@FEW
@given(recipes(KINDS, 7), training_layouts, trainings)
def test_random_model_trains_as_in_the_plain_loop(
    recipe: Recipe, layout: Layout, training: Training
) -> None:
    accept(recipe, layout, training)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # hundreds of examples
@MANY
@given(recipes(KINDS, 12), training_layouts, trainings)
def test_many_random_models_train_as_in_the_plain_loop(
    recipe: Recipe, layout: Layout, training: Training
) -> None:
    accept(recipe, layout, training)
