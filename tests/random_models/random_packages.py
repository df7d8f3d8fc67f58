"""Random models as packages: cut at random places, emitted, and loaded to run here."""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import random_steps  # noqa: F401  # what the steps of recipes do
import torch
from hypothesis import currently_in_test_context, event, note
from hypothesis import strategies as st
from loading import load_package
from random_cuts import most_stages, random_cut
from random_models import LOSS_FUNCTIONS, RandomModel, Recipe, call_of

import gpipe_compiler.runtime.train.command  # noqa: F401  # the runtime of every package here, whole
from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.legality import check
from gpipe_compiler.options import LossChoice, Policy, RematChoice
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.cut_problem import CutFacts, MicrobatchGraph, problem_of
from gpipe_compiler.planner.planner import make_plan
from gpipe_compiler.planner.planning import pipeline_devices
from gpipe_compiler.runtime.schedule.choosing import placement_for
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind
from gpipe_compiler.targets.torch_stages import emit

_COUNTER = itertools.count()


@dataclass(frozen=True)
class Layout:
    """How a model is cut, and how it is planned to compute. `cut` None asks for the best cut.

    Attributes:
        stages: at most so many, as many as the model and the schedule can have.
        size: samples in a micro-batch.
        wide: whether the model and its inputs are in double precision.
        devices: picks one of the numbers of devices that the schedule can have the stages on.
    """

    stages: int
    microbatches: int = 2
    schedule: ScheduleKind = ScheduleKind.GPIPE
    cut: int | None = None
    size: int = 2
    one_device: bool = False
    training: bool = True
    remat: RematChoice = RematChoice.NONE
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    wide: bool = False
    devices: int = 0

    @property
    def policy(self) -> Policy:
        return Policy(
            schedule=self.schedule,
            remat=self.remat,
            batchnorm=self.batchnorm,
            precision=self.precision,
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.wide else torch.float32


def device_counts(kind: ScheduleKind, stages: int) -> list[int]:
    """The numbers of devices that a schedule can have so many stages on, most first."""
    found = []
    for devices in range(stages, 0, -1):
        with suppress(ValueError):
            placement_for(kind, stages, devices)
            found.append(devices)
    return found


def _legal(layout: Layout) -> bool:
    exact = layout.batchnorm is BatchNorm.EXACT
    return not exact or layout.schedule is ScheduleKind.GPIPE


layouts = st.builds(
    Layout,
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from(ScheduleKind),
    st.one_of(st.integers(0, 1 << 16), st.none()),
    st.integers(2, 3),
    st.booleans(),
    st.sampled_from((True, True, True, False)),
    st.sampled_from((RematChoice.NONE, RematChoice.FULL)),
    st.sampled_from(BatchNorm),
    st.sampled_from((Precision.FP32, Precision.FP32, Precision.BF16)),
    devices=st.integers(0, 3),
).filter(_legal)


def subject_of(recipe: Recipe, layout: Layout) -> Subject:
    torch.manual_seed(recipe.seed)
    model = RandomModel(recipe).to(layout.dtype)
    call = call_of(recipe, layout.size * layout.microbatches, dtype=layout.dtype)
    loss_fn = LOSS_FUNCTIONS.get(recipe.loss)
    loss = LossChoice.SUM_OF_SQUARES if recipe.loss == "none" else LossChoice.MODEL
    training = layout.training
    return Subject("random", model, call.args, call.kwargs, call.target, loss_fn, training, loss)


def traced(subject: Subject) -> Graph:
    """Its graph, not compared with the model: packages are."""
    with mock.patch.object(tracing, "differences", return_value=[]):
        return tracing.trace(subject)


def plan_of(graph: Graph, layout: Layout) -> Plan:
    cluster = local_cluster()
    annotated = annotate(graph, layout.size, layout.precision)
    graph = check(weigh_loss(annotated), after="loss_weight")
    costs = roofline(graph, cluster.devices[0])
    problem = problem_of(CutFacts.of(graph, costs))
    stages, kind = min(layout.stages, most_stages(problem)), layout.schedule
    while stages > 1 and not device_counts(kind, stages):
        stages -= 1
    possible = device_counts(kind, stages)
    if not possible:
        kind, possible = ScheduleKind.ONE_F_ONE_B, [1]
    devices = possible[layout.devices % len(possible)]
    if currently_in_test_context():
        event(f"{kind.value}: {stages} stages on {devices} devices")
    policy = replace(layout.policy, schedule=kind)
    if not layout.training:
        devices = pipeline_devices(cluster, stages, policy, training=False)
    prepared = MicrobatchGraph.of(graph, [costs])
    choice = Choice(stages, devices, kind, layout.microbatches)
    builder = CandidateBuilder.of(prepared, cluster, choice, policy)
    made = partial(make_plan, builder, layout.size * layout.microbatches)
    if layout.cut is None:
        return made()
    chosen = random_cut(layout.cut)
    with mock.patch("gpipe_compiler.planner.candidates.cut", chosen):
        return made()


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
    return load_package(directory, name)


def forget(module: ModuleType) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == module.__name__]:
        del sys.modules[name]


@contextmanager
def package_of(plan: Plan) -> Iterator[tuple[ModuleType, Path]]:
    """The package of a plan, and its folder; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="random-model-"))
    try:
        directory = emit(plan, folder / "package")
        for stage in sorted(directory.glob("stage_*.py")) * currently_in_test_context():
            note(f"{stage.name}:\n{stage.read_text()}")
        module = load(directory)
        try:
            yield module, directory
        finally:
            forget(module)
    finally:
        shutil.rmtree(folder)
