"""The whole compiler against random models, cut at random places.

Every example is traced, planned, emitted and run as a pipeline, and must equal the plain model:
outputs, loss, gradients, buffers, weights after a step.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import random_steps  # noqa: F401  # what the steps of recipes do
import torch
from hypothesis import (
    HealthCheck,
    assume,
    currently_in_test_context,
    event,
    given,
    note,
    settings,
)
from hypothesis import strategies as st
from random_cuts import most_stages, random_cut
from random_models import REGIONS, RUN, RandomModel, Recipe, Step, call_of, mean_square, recipes
from safetensors.torch import save_file

import gpipe_compiler.runtime.command  # noqa: F401  # the runtime of every package here, whole
from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.codegen.package import emit
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.auto import Frontend, trace
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.cut_graph import Facts, problem_of
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan
from gpipe_compiler.planning import make_plan
from gpipe_compiler.policy import Policy
from gpipe_compiler.runtime.check import check_pipeline
from gpipe_compiler.runtime.comparison import Row, pack
from gpipe_compiler.runtime.data import example_call
from gpipe_compiler.runtime.pipeline import Pipeline
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.validate import reference_of

_COUNTER = itertools.count()
SEED = 3


@dataclass(frozen=True)
class Layout:
    """How a model is cut and run. `cut` None asks for the best cut."""

    stages: int
    microbatches: int = 2
    schedule: ScheduleKind = ScheduleKind.GPIPE
    cut: int | None = None
    size: int = 2
    one_device: bool = False
    training: bool = True


layouts = st.builds(
    Layout,
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(ScheduleKind),
    st.one_of(st.integers(0, 1 << 16), st.none()),
    st.integers(2, 3),
    st.booleans(),
    st.sampled_from((True, True, True, False)),
)


def subject_of(recipe: Recipe, layout: Layout) -> Subject:
    torch.manual_seed(recipe.seed)
    model = RandomModel(recipe)
    call = call_of(recipe, layout.size * layout.microbatches)
    loss_fn = mean_square if recipe.loss == "function" else None
    return Subject("random", model, call.args, call.kwargs, call.target, loss_fn, layout.training)


def plan_of(graph: Graph, layout: Layout) -> Plan:
    cluster = local_cluster()
    graph = annotate(graph, layout.size)
    costs = roofline(graph, cluster.device)
    problem = problem_of(Facts.of(graph, costs))
    stages = min(layout.stages, most_stages(problem, cluster.link))
    if currently_in_test_context():
        event(f"{stages} stages")
    options = {
        "stages": stages,
        "microbatches": layout.microbatches,
        "batch_size": layout.size * layout.microbatches,
        "policy": Policy(layout.schedule),
        "cluster": cluster,
        "costs": costs,
    }
    if layout.cut is None:
        return make_plan(graph, **options)
    chosen = random_cut(layout.cut)
    with mock.patch("gpipe_compiler.drafting.cut", chosen):
        return make_plan(graph, **options)


def load(directory: Path) -> ModuleType:
    """The package in a folder, on this compiler's own runtime instead of its copy."""
    name = f"random_package_{next(_COUNTER)}"
    runtime = "gpipe_compiler.runtime"
    sys.modules.update(
        {
            name + loaded.removeprefix("gpipe_compiler"): module
            for loaded, module in list(sys.modules.items())
            if loaded == runtime or loaded.startswith(f"{runtime}.")
        }
    )
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forget(module: ModuleType) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == module.__name__]:
        del sys.modules[name]


def differences(subject: Subject, plan: Plan, directory: Path) -> tuple[Row, ...]:
    """The package in a folder held against the model."""
    expected, _ = reference_of(subject, plan, SEED)
    reference = directory / "reference.safetensors"
    save_file(pack(expected), reference)
    package = load(directory)
    devices = ["cpu"] if directory.name == "one" else None
    try:
        inputs, target = example_call(package.SPEC, directory, None)
        with Pipeline(
            package.SPEC, directory / "weights", devices=devices, seed=SEED, timeout_s=60
        ) as pipe:
            return check_pipeline(pipe, directory / "weights", inputs, target, reference)
    finally:
        forget(package)


def hold(recipe: Recipe, layout: Layout, frontend: Frontend = Frontend.FX) -> None:
    """Compiles a recipe and holds the package against the model."""
    subject = subject_of(recipe, layout)
    graph = trace(subject, frontend)
    plan = plan_of(graph, layout)
    folder = Path(tempfile.mkdtemp(prefix="random-model-"))
    try:
        directory = emit(plan, folder / ("one" if layout.one_device else "many"))
        for stage in sorted(directory.glob("stage_*.py")) * currently_in_test_context():
            note(f"{stage.name}:\n{stage.read_text()}")
        rows = differences(subject, plan, directory)
    finally:
        shutil.rmtree(folder)
    faults = [f"{row.what}: {fault}" for row in rows for fault in row.faults]
    assert not faults, "\n".join(faults)


def accept(recipe: Recipe, layout: Layout, frontend: Frontend) -> None:
    """Holds a drawn example; a model that does not run by itself is no example."""
    try:
        hold(recipe, layout, frontend)
    except ModelError as error:
        assume("the model raises" not in error.problem)
        raise


EVERY_KIND = sorted(RUN)
FX_KINDS = [kind for kind in EVERY_KIND if kind not in REGIONS]
FEW = settings(max_examples=30, derandomize=True, deadline=None, database=None)
MANY = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@FEW
@given(recipes(FX_KINDS, 7), layouts)
def test_random_model_equals_its_package(recipe: Recipe, layout: Layout) -> None:
    accept(recipe, layout, Frontend.FX)


@settings(FEW, max_examples=5)
@given(recipes(EVERY_KIND, 6), layouts)
def test_random_model_that_was_exported_equals_its_package(recipe: Recipe, layout: Layout) -> None:
    accept(recipe, layout, Frontend.EXPORT)


@pytest.mark.slow
@MANY
@given(recipes(FX_KINDS, 12), layouts)
def test_many_random_models_equal_their_packages(recipe: Recipe, layout: Layout) -> None:
    accept(recipe, layout, Frontend.FX)


@pytest.mark.slow
@settings(MANY, max_examples=100)
@given(recipes(EVERY_KIND, 10), layouts)
def test_many_exported_random_models_equal_their_packages(recipe: Recipe, layout: Layout) -> None:
    accept(recipe, layout, Frontend.EXPORT)


@pytest.mark.parametrize(
    ("steps", "options", "layout", "frontend"),
    [
        pytest.param(
            [("write_old", 0, 4, 2)], {"seed": 1}, Layout(1, 1), "fx", id="written input returned"
        ),
        pytest.param(
            [("write_old", 0, 4, 2), ("cast",), ("linear",)],
            {"output": "input"},
            Layout(3, 2, cut=1),
            "fx",
            id="written input read by a later stage and returned",
        ),
        pytest.param(
            [("linear",)], {"output": "twice"}, Layout(1, 2), "fx", id="a mask is an output"
        ),
        pytest.param(
            [("linear",)],
            {"loss": "own"},
            Layout(2, 4, training=False),
            "fx",
            id="an output is the mean over the batch",
        ),
        pytest.param(
            [("linear",), ("running", 0, 0, 2), ("linear",)],
            {},
            Layout(2, 2, cut=0),
            "fx",
            id="a buffer is written in eval mode too",
        ),
        pytest.param(
            [("autocast", 1, 4, 0), ("linear",)], {}, Layout(1, 1), "export", id="unread region"
        ),
        pytest.param(
            [("no_grad", 4, 0, 2), ("add", 0, 2, 1), ("no_grad", 1, 3, 1)],
            {"call": "extra", "seed": 1},
            Layout(1, 1),
            "export",
            id="a value used in a region and, unread, outside of it",
        ),
        pytest.param(
            [("flatten", 2, 0, 1), ("drop_path", 0, 5, 2), ("running", 1, 0, 0)],
            {},
            Layout(2, 1, size=3),
            "export",
            id="a stage of nothing but a mask of the batch's size",
        ),
    ],
)
def test_models_that_once_went_wrong(
    steps: list[tuple[object, ...]], options: dict[str, object], layout: Layout, frontend: str
) -> None:
    recipe = Recipe(tuple(Step(*step) for step in steps), **options)
    hold(recipe, layout, Frontend(frontend))
