"""The whole compiler against random models, cut at random places.

Every example is traced, planned, emitted and run as a pipeline, and must equal the plain model:
outputs, loss, gradients, buffers, weights after a step.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, assume, given, settings
from random_models import RUN, TYPED, Recipe, Step, recipes
from random_packages import Layout, device_counts, layouts, package_of, plan_of, subject_of, traced
from safetensors.torch import save_file

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.spec import BatchNorm, Precision
from gpipe_compiler.runtime.train.check import check_pipeline
from gpipe_compiler.runtime.train.comparison import Row, pack
from gpipe_compiler.runtime.train.data import InputChoice, example_call
from gpipe_compiler.validate.package import reference_of

SEED = 3


def hold(recipe: Recipe, layout: Layout) -> None:
    """Compiles a recipe and compares the package with the model."""
    subject = subject_of(recipe, layout)
    plan = plan_of(traced(subject), layout)
    with package_of(plan) as (package, directory):
        rows = differences(subject, plan, package, directory, one_device=layout.one_device)
    faults = [f"{row.what}: {fault}" for row in rows for fault in row.faults]
    assert not faults, "\n".join(faults)


def differences(
    subject: Subject, plan: Plan, package: ModuleType, directory: Path, *, one_device: bool
) -> tuple[Row, ...]:
    """The package in a folder compared with the model."""
    expected, _ = reference_of(subject, plan, SEED, per_microbatch=True)
    reference = directory / "reference.safetensors"
    save_file(pack(expected), reference)
    spec = package.SPEC
    fewest = device_counts(spec.schedule, len(spec.stages))[-1]
    devices = ["cpu"] * fewest if one_device else None
    inputs, target = example_call(spec, directory, InputChoice())
    with Pipeline(spec, directory / "weights", devices=devices, seed=SEED, timeout_s=60) as pipe:
        return check_pipeline(pipe, directory / "weights", inputs, target, [reference])


def accept(recipe: Recipe, layout: Layout) -> None:
    """Holds a drawn example; a model that does not run by itself is no example."""
    if layout.precision is not Precision.FP32:
        assume(TYPED.isdisjoint(step.kind for step in recipe.steps))
    try:
        hold(recipe, layout)
    except ModelError as error:
        assume("the model raises" not in error.problem)
        raise


EVERY_KIND = sorted(RUN)
FEW = settings(max_examples=10, derandomize=True, deadline=None, database=None)
MANY = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@FEW
@given(recipes(EVERY_KIND, 7), layouts)
def test_random_model_equals_its_package(recipe: Recipe, layout: Layout) -> None:
    accept(recipe, layout)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # hundreds of examples
@MANY
@given(recipes(EVERY_KIND, 12), layouts)
def test_many_random_models_equal_their_packages(recipe: Recipe, layout: Layout) -> None:
    accept(recipe, layout)


@pytest.mark.parametrize(
    ("steps", "options", "layout"),
    [
        pytest.param(
            [("write_old", 0, 4, 2)], {"seed": 1}, Layout(1, 1), id="written input returned"
        ),
        pytest.param(
            [("write_old", 0, 4, 2), ("cast",), ("linear",)],
            {"output": "input"},
            Layout(3, 2, cut=1),
            id="written input read by a later stage and returned",
        ),
        pytest.param([("linear",)], {"output": "twice"}, Layout(1, 2), id="a mask is an output"),
        pytest.param(
            [("linear",)],
            {"loss": "own"},
            Layout(2, 4, training=False),
            id="an output is the mean over the batch",
        ),
        pytest.param(
            [("linear",), ("running", 0, 0, 2), ("linear",)],
            {},
            Layout(2, 2, cut=0),
            id="a buffer is written in eval mode too",
        ),
        pytest.param([("autocast", 1, 4, 0), ("linear",)], {}, Layout(1, 1), id="unread region"),
        pytest.param(
            [("no_grad", 4, 0, 2), ("add", 0, 2, 1), ("no_grad", 1, 3, 1)],
            {"call": "extra", "seed": 1},
            Layout(1, 1),
            id="a value used in a region and, unread, outside of it",
        ),
        pytest.param(
            [("flatten", 2, 0, 1), ("drop_path", 0, 5, 2), ("running", 1, 0, 0)],
            {},
            Layout(2, 1, size=3),
            id="a stage of nothing but a mask of the batch's size",
        ),
        pytest.param(
            [
                *[("linear",), ("functional_dropout", 4), ("causal",), ("frozen",)],
                *[("write_old", 3, 0, 1), ("causal",), ("linear",)],
            ],
            {"output": "tensor", "call": "none"},
            Layout(4, 1),
            id="dropout gives its argument back in eval mode, which is written later",
        ),
        pytest.param(
            [("linear",), ("running", 0, 1, 1), ("linear",)],
            {"output": "dict", "call": "extra"},
            Layout(2, 2, batchnorm=BatchNorm.EXACT),
            id="a sum of what goes with running means is a sum",
        ),
    ],
)
def test_models_that_once_went_wrong(
    steps: list[tuple[object, ...]], options: dict[str, object], layout: Layout
) -> None:
    recipe = Recipe(tuple(Step(*step) for step in steps), **options)
    hold(recipe, layout)
